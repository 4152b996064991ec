// program/flags.cpp - the table of flags, and how the command line is read by it (flags.h).
#include "flags.h"

#include <algorithm>
#include <cfloat>
#include <charconv>
#include <variant>

#include "../common/known_models.h"
#include "../data/data_files.h"

namespace coat {

namespace {

// What a resumed run does with a flag.
enum OnResume : uint8_t {
    NOT_SAVED,      // a checkpoint does not keep its value
    MAY_CHANGE,     // another value may be given
    CHANGES_STEPS,  // another value may be given; checkpoints record it, because later steps depend on it
    MUST_MATCH,     // another value is an error, because it would change what the saved tensors mean
};

struct Flag {
    const char* name;
    std::variant<std::string Flags::*, int64_t Flags::*, double Flags::*, bool Flags::*> member;
    OnResume on_resume;
    const char* about;                   // its line of --help
    const char* words = "";              // the texts that may be given, separated by spaces; "": any text
    const char* gpu_default = nullptr;   // the default on a GPU; null: the default of Flags
    const char* help_default = nullptr;  // the default as --help shows it; null: as these two are
    int64_t least = 0;                   // the smallest number that may be given
    double most = FLT_MAX;               // the largest, of a flag that is no whole number
    const char* title = nullptr;         // the title above it in --help, where a group of flags begins

    bool is_switch() const { return std::holds_alternative<bool Flags::*>(member); }  // it takes no value
};

}  // namespace

constexpr double LARGEST_BETA = 0.9999;

// clang-format off
static const Flag FLAGS[] = {
    {.name = "device", .member = &Flags::device, .on_resume = NOT_SAVED,
     .about = "auto is the GPU if there is one", .words = "auto cpu gpu",
     .title = "What is trained, and where"},
    {.name = "ranks", .member = &Flags::ranks, .on_resume = NOT_SAVED,
     .about = "processes, one for each GPU; torchrun sets it itself", .least = 1},
    {.name = "model", .member = &Flags::model, .on_resume = MUST_MATCH,
     .about = "a named model; or a folder: of a run, or from Hugging Face", .gpu_default = "llama-30m"},
    {.name = "recipe", .member = &Flags::recipe, .on_resume = MUST_MATCH,
     .about = "formats of weights, activations and gradients"},
    {.name = "optimizer", .member = &Flags::optimizer, .on_resume = MUST_MATCH,
     .about = "formats of the moments; default: the recipe's"},
    {.name = "attention", .member = &Flags::attention, .on_resume = MUST_MATCH,
     .about = "how q, k, v, output are saved; groups: FP8, a scale per 16",
     .words = "unquantized groups"},
    {.name = "master", .member = &Flags::master, .on_resume = MUST_MATCH,
     .about = "exact: FP32; none: BF16 weights, stochastic rounding", .words = "exact none"},
    {.name = "gradients", .member = &Flags::gradients, .on_resume = MUST_MATCH,
     .about = "none: used at once; needs --clip 0, --accumulate 1, one GPU", .words = "kept none"},
    {.name = "data", .member = &Flags::data, .on_resume = MAY_CHANGE,
     .about = "text, folders of it, token files (.bin); separated by commas",
     .title = "The data and the steps"},
    {.name = "val", .member = &Flags::val, .on_resume = MAY_CHANGE,
     .about = "held-out text or token files; default: a part of --data"},
    {.name = "batch", .member = &Flags::batch, .on_resume = MUST_MATCH,
     .about = "sequences per micro-batch", .gpu_default = "32", .least = 1},
    {.name = "seq", .member = &Flags::seq, .on_resume = MUST_MATCH,
     .about = "tokens per sequence; of conversations: that of tokenize.py", .gpu_default = "1024",
     .least = 1},
    {.name = "accumulate", .member = &Flags::accumulate, .on_resume = MUST_MATCH,
     .about = "micro-batches per step, on each rank", .least = 1},
    {.name = "steps", .member = &Flags::steps, .on_resume = CHANGES_STEPS,
     .about = "steps in total; 0 evaluates on held-out text and stops", .gpu_default = "900"},
    {.name = "lr", .member = &Flags::lr, .on_resume = CHANGES_STEPS,
     .about = "peak of the learning rate, which falls to a tenth", .help_default = "by size, see below"},
    {.name = "warmup", .member = &Flags::warmup, .on_resume = CHANGES_STEPS,
     .about = "steps of linear warm-up, before half a cosine",
     .help_default = "100; less if short"},
    {.name = "beta1", .member = &Flags::beta1, .on_resume = CHANGES_STEPS,
     .about = "AdamW's decay of first moments (its eps is 1e-8)", .most = LARGEST_BETA},
    {.name = "beta2", .member = &Flags::beta2, .on_resume = CHANGES_STEPS,
     .about = "AdamW's decay of second moments", .most = LARGEST_BETA},
    {.name = "weight-decay", .member = &Flags::weight_decay, .on_resume = CHANGES_STEPS,
     .about = "decoupled weight decay of matrices"},
    {.name = "clip", .member = &Flags::clip, .on_resume = CHANGES_STEPS,
     .about = "clip gradients to this global norm; 0: do not clip"},
    {.name = "seed", .member = &Flags::seed, .on_resume = MUST_MATCH,
     .about = "random seed of first weights, order of data, samples"},
    {.name = "out", .member = &Flags::out, .on_resume = NOT_SAVED,
     .about = "folder for checkpoints; \"\": save none",
     .title = "What is saved"},
    {.name = "save-every", .member = &Flags::save_every, .on_resume = MAY_CHANGE,
     .about = "steps between checkpoints; 0: about half an hour"},
    {.name = "keep", .member = &Flags::keep, .on_resume = MAY_CHANGE,
     .about = "newest checkpoints in --out; older ones are deleted", .least = 1},
    {.name = "resume", .member = &Flags::resume, .on_resume = NOT_SAVED,
     .about = "continue this checkpoint, or the newest in a folder"},
    {.name = "eval-every", .member = &Flags::eval_every, .on_resume = MAY_CHANGE,
     .about = "steps between validations; 0: first and last", .gpu_default = "150",
     .title = "What is measured and written"},
    {.name = "eval-tokens", .member = &Flags::eval_tokens, .on_resume = MAY_CHANGE,
     .about = "held-out tokens of a validation", .gpu_default = "131072", .least = 1},
    {.name = "sample-every", .member = &Flags::sample_every, .on_resume = MAY_CHANGE,
     .about = "steps between samples of text, and one at the end; 0: none", .gpu_default = "300"},
    {.name = "temperature", .member = &Flags::temperature, .on_resume = NOT_SAVED,
     .about = "of --prompt and samples; 0: the most probable token"},
    {.name = "log", .member = &Flags::log, .on_resume = MAY_CHANGE,
     .about = "file for a log in JSON lines; --resume continues it"},
    {.name = "prompt", .member = &Flags::prompt, .on_resume = NOT_SAVED,
     .about = "print how a model of bytes continues this, and stop",
     .title = "Instead of training"},
    {.name = "new-tokens", .member = &Flags::new_tokens, .on_resume = NOT_SAVED,
     .about = "tokens that --prompt generates, at most"},
    {.name = "plan", .member = &Flags::plan, .on_resume = NOT_SAVED,
     .about = "print formats and memory of the run, and stop"},
};
// clang-format on

// The value of a flag, as a string, a number or a boolean of JSON.
static ordered_json value(const Flags& flags, const Flag& flag) {
    return std::visit([&](auto member) { return ordered_json(flags.*member); }, flag.member);
}
// A value as it is written on the command line.
static std::string text_of(const ordered_json& value) {
    return value.is_string() ? value.get<std::string>() : value.dump();
}

// Reads the value of a flag from its text. Error if the text is none of the flag's words, or is no number in
// the flag's range. Whole numbers have at most 31 bits, so that batch x seq cannot overflow. Other numbers
// are used in FP32, where they must be finite.
static void read_value(const Flag& flag, const std::string& text, std::string& value) {
    if (*flag.words && !is_one_of(flag.words, text))
        throw Error("--", flag.name, " ", text, " is not one of: ", flag.words, "; give one of these.");
    if (flag.on_resume != NOT_SAVED && utf8_length(text) < text.size())
        throw Error("--", flag.name, " ", text, " is not UTF-8, as the files of checkpoints are; ",
                    "rename it, or give a link with another name.");
    value = text;
}
// Whether the text is a number from `least` to `most`; sets value if so.
template <class Number>
static bool read_number(const std::string& text, Number least, Number most, Number& value) {
    Number number{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    const bool is_number = error == std::errc() && *end == 0;
    if (!is_number || !(number >= least && number <= most)) return false;  // NaN is not in the range
    value = number;
    return true;
}
static void read_value(const Flag& flag, const std::string& text, int64_t& value) {
    if (!read_number<int64_t>(text, flag.least, INT32_MAX, value))
        throw Error("--", flag.name, " ", text, " is not a whole number from ", flag.least, " to ", INT32_MAX,
                    "; give such a number.");
}
static void read_value(const Flag& flag, const std::string& text, double& value) {
    if (read_number<double>(text, double(flag.least), flag.most, value)) return;
    const std::string allowed = flag.most < FLT_MAX
                                    ? concat("from ", flag.least, " to ", flag.most)
                                    : concat("of at least ", flag.least, " that is finite in FP32");
    throw Error("--", flag.name, " ", text, " is not a number ", allowed, "; give such a number.");
}
static void read_value(const Flag&, const std::string&, bool& value) { value = true; }  // it was given

static void set(Flags& flags, const Flag& flag, const std::string& text) {
    std::visit([&](auto member) { read_value(flag, text, flags.*member); }, flag.member);
}

// -----------------------------------------------------------------------------------------------------------
// The defaults of the learning rate and the warm-up

namespace {

struct RateOfSize {
    int64_t millions;  // the most parameters that a model with this rate has, in millions
    double lr;
};

}  // namespace

// From 100 million parameters on the rates are those of GPT-3 (Brown et al. 2020, table 2.1), whose models
// have 125, 350, 760, 1300, 2700, 6700 and 13000 million parameters. The limits lie between them.
constexpr RateOfSize RATES[] = {{10, 3e-3},     {100, 1e-3},     {200, 6e-4},
                                {500, 3e-4},    {1000, 2.5e-4},  {2000, 2e-4},
                                {4000, 1.6e-4}, {10000, 1.2e-4}, {INT32_MAX, 1e-4}};

double default_learning_rate(int64_t parameters) {
    const auto has_size = [&](const RateOfSize& row) { return parameters <= row.millions * 1'000'000; };
    return std::find_if(std::begin(RATES), std::end(RATES), has_size)->lr;
}

int64_t default_warmup(int64_t steps) { return steps < 250 ? steps / 10 : 100; }

// -----------------------------------------------------------------------------------------------------------
// The command line

// The flag of this name, with its dashes.
static const Flag& find_flag(const std::string& name) {
    const Flag* flag = name.starts_with("--") ? find_row_or_null(FLAGS, name.substr(2)) : nullptr;
    if (!flag) throw Error(name, " is not a flag; ./train --help lists all flags.");
    return *flag;
}

void Flags::parse(const std::vector<std::string>& arguments) {
    for (size_t i = 0; i < arguments.size(); i++) {
        const std::string& argument = arguments[i];  // "--flag", or "--flag=value"
        const size_t equals = argument.find('=');
        const bool has_value = equals != argument.npos;
        const std::string name = argument.substr(0, equals);
        help = name == "--help" || name == "-h";
        version = name == "--version";
        if (help || version) return;
        const Flag& flag = find_flag(name);
        given_.insert(flag.name);
        std::string value = has_value ? argument.substr(equals + 1) : "";
        if (flag.is_switch() && has_value) throw Error(name, " takes no value; give ", name, " alone.");
        if (!flag.is_switch() && !has_value) {  // the value is the next argument
            i++;
            if (i == arguments.size()) throw Error(name, " needs a value after it.");
            value = arguments[i];
        }
        set(*this, flag, value);
    }
}

void Flags::take_gpu_defaults() {
    for (const Flag& flag : FLAGS)
        if (flag.gpu_default && !given(flag.name)) set(*this, flag, flag.gpu_default);
}

std::string Flags::take_checkpoint(const ordered_json& saved) {
    std::string changes;
    for (const Flag& flag : FLAGS) {
        if (flag.on_resume == NOT_SAVED) continue;
        const ordered_json ours = value(*this, flag);
        const ordered_json theirs = saved.at(flag.name);
        if (!given(flag.name)) {
            set(*this, flag, text_of(theirs));
        } else if (flag.on_resume == MUST_MATCH && ours != theirs) {
            throw Error("--", flag.name, " ", ours.dump(), " differs from the checkpoint's ", theirs.dump(),
                        "; leave it out to continue that run, or leave --resume out to begin another.");
        } else if (flag.on_resume == CHANGES_STEPS && ours != theirs) {
            changes += changes.empty() ? "" : ", ";
            changes += concat("--", flag.name, " ", ours.dump(), " (before: ", theirs.dump(), ")");
        }
    }
    return changes;
}

ordered_json Flags::all_as_json() const {
    ordered_json values;
    for (const Flag& flag : FLAGS)
        if (!flag.is_switch()) values[flag.name] = value(*this, flag);
    return values;
}

ordered_json Flags::saved_as_json() const {
    ordered_json values = all_as_json();
    for (const Flag& flag : FLAGS)
        if (flag.on_resume == NOT_SAVED) values.erase(flag.name);
    return values;
}

// -----------------------------------------------------------------------------------------------------------
// What --help and --version print

void print_version() { std::printf("COAT %s (arXiv 2410.19313), ./train\n", VERSION); }

static void print_default_schedule() {
    std::printf(
        "\n--lr and --warmup\n"
        "  Weights from a folder have the default %g, and new weights one by the number of parameters\n"
        "  (from 100 million on as in GPT-3: Brown et al. 2020, table 2.1):\n",
        FINE_TUNING_RATE);
    for (const RateOfSize& row : RATES) {
        const bool is_last = row.millions == INT32_MAX;
        const std::string size = is_last ? "more" : concat("up to ", row.millions, " million");
        std::printf("  %-20s %g\n", size.c_str(), row.lr);
    }
    std::printf("  The default warm-up has 100 steps; in a run of fewer than 250, a tenth of its steps.\n");
}

void print_help() {
    std::printf(
        "./train trains a Llama, Mistral, Qwen or GPT-2 model in FP8 with COAT (arXiv 2410.19313).\n"
        "Without flags it trains a small model on C++ headers found on this machine.\n"
        "-h or --help prints this, --version the version. A value follows its flag: --steps 9 or\n"
        "--steps=9. Flags, defaults (on a CPU | on a GPU, where they differ), and what they mean:\n");
    const Flags standard;
    for (const Flag& flag : FLAGS) {
        if (flag.title) std::printf("\n%s\n", flag.title);
        std::string text = flag.is_switch() ? "" : text_of(value(standard, flag));
        if (flag.gpu_default) text += concat(" | ", flag.gpu_default);
        if (flag.help_default) text = flag.help_default;
        std::printf("  --%-12s %-22s %s\n", flag.name, text.c_str(), flag.about);
        if (*flag.words) std::printf("%40sone of: %s\n", "", flag.words);
    }
    std::printf("\n--model\n");
    for (const ModelConfig& config : known_models())
        std::printf("  %-16s %s, %ld layers, hidden size %ld, %ld positions\n", config.name.c_str(),
                    config.arch.name, config.L, config.C, config.max_T);
    std::printf("\n--recipe\n");
    for (const Recipe& r : recipes()) std::printf("  %-12s %s\n", r.name, r.about);
    std::printf("\n--optimizer\n");
    for (const OptimizerFormats& o : optimizers()) std::printf("  %-12s %s\n", o.name, o.about);
    print_default_schedule();
    std::printf(
        "\n--data\n"
        "  The tokens of text are its bytes. data/tokenize.py makes token files with a tokenizer.\n"
        "  Without --val, held out for validation are token files with the word val in their names; of\n"
        "  text in 20 or more files, every 20th file; else the last tenth of all tokens.\n"
        "\nA step prints\n"
        "  loss (nats per token), norm (of all gradients, before clipping), lr (learning rate), the\n"
        "  time that it took, speed on all ranks, and the time that is left.\n"
        "\nExamples\n"
        "  ./train --data books --out mine --steps 2000          a new model, on the texts in books\n"
        "  ./train --model mine --prompt \"Once upon a time\"      lets it write\n");
}

}  // namespace coat

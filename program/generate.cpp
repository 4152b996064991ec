// program/generate.cpp - draws tokens from a model's logits, and --prompt (generate.h).
#include "generate.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "../data/files.h"
#include "../gpu/gpu_model.h"
#include "resume.h"

namespace coat {

// Draws a token with the probabilities softmax(logits / temperature).
static int32_t draw(const std::vector<float>& logits, double temperature, std::mt19937_64& random) {
    const auto largest = std::max_element(logits.begin(), logits.end());
    if (temperature == 0) return int32_t(largest - logits.begin());
    std::vector<float> weights;  // the probabilities times a constant
    for (const float logit : logits) weights.push_back(std::exp((logit - *largest) / float(temperature)));
    return std::discrete_distribution<int32_t>(weights.begin(), weights.end())(random);
}

void generate_tokens(Model& model, ProcessGroup& processes, const SamplingOptions& drawing,
                     std::vector<int32_t>& tokens, const std::function<void()>& on_token) {
    std::vector<float> logits(size_t(model.settings().config.V));
    std::mt19937_64 random(drawing.seed);
    for (int64_t i = 0; i < drawing.most; i++) {
        const int64_t count = std::min(int64_t(tokens.size()), model.settings().T);
        model.next_logits(&*tokens.end() - count, count, logits.data());
        const int32_t mine = draw(logits, drawing.temperature, random);
        tokens.push_back(processes.all_gather(mine).front());  // ranks must end together
        on_token();
        if (tokens.back() == drawing.end_token) return;
    }
}

std::vector<int32_t> sample_prompt(const TokenStream& validation, int64_t T) {
    constexpr int64_t OF_TEXT = 16;         // tokens
    constexpr int64_t MOST_WINDOWS = 1000;  // that are looked at
    const auto size = size_t(T);
    std::vector<int32_t> tokens(size), targets(size);
    std::vector<int32_t> longer;  // the first question that leaves less than half of the window
    for (int64_t window = 0; window < MOST_WINDOWS && (window + 1) * T <= validation.size(); window++) {
        validation.read(window * T, T, tokens.data(), targets.data());
        const auto is_counted = [](int32_t target) { return target != NO_TARGET; };
        const int64_t first = std::find_if(targets.begin(), targets.end(), is_counted) - targets.begin();
        if (first == 0) return {tokens.begin(), tokens.begin() + (T > OF_TEXT ? OF_TEXT : 0)};
        const std::vector<int32_t> prompt(tokens.begin(), tokens.begin() + first);
        if (first <= T / 2) return prompt;
        if (first < T && longer.empty()) longer = prompt;
    }
    return longer;
}

// -----------------------------------------------------------------------------------------------------------
// --prompt

// Whether the tokens of the model in a folder are bytes. ./train itself can make only these of text: how
// another tokenizer cuts text into words is known to Python alone.
static bool tokens_are_bytes(const std::string& folder, const ModelConfig& config) {
    return config.V == 256 && tokenizer_in(folder).empty() && !fs::exists(path_in(folder, "tokenizer.bin"));
}

std::string command_to_try(const std::string& checkpoint, const ModelConfig& config) {
    if (checkpoint.empty()) return "";
    const std::string out = fs::path(checkpoint).parent_path().string();
    if (tokens_are_bytes(checkpoint, config)) return "./train --model " + out + " --prompt \"Some text\"";
    return tokenizer_in(checkpoint).empty() ? "" : "python3 data/chat.py " + out;
}

static void require_bytes(const std::string& folder, const ModelConfig& config) {
    if (tokens_are_bytes(folder, config)) return;
    const char* const option =
        tokenizer_in(folder).empty() ? " --tokenizer and the folder of its token files" : "";
    throw Error("--prompt is for models whose tokens are bytes, and ", folder,
                " has other tokens; use python3 data/chat.py ", folder, option, ".");
}

// The bytes of the text. Empty text stands for the beginning of a line.
static std::vector<int32_t> tokens_of(const std::string& text) {
    if (text.empty()) return {'\n'};
    const auto* const bytes = reinterpret_cast<const uint8_t*>(text.data());
    return {bytes, bytes + text.size()};
}

// How many bytes at the end of a text are the beginning of a UTF-8 character that is not complete. A byte
// 11xxxxxx begins a character of several bytes, 10xxxxxx continues one, and 0xxxxxxx is one.
static size_t incomplete_end(const std::string& text) {
    for (size_t n = 1; n <= std::min<size_t>(3, text.size()); n++) {
        const auto byte = uint8_t(text[text.size() - n]);
        const size_t length = 2 + (byte >= 0xE0) + (byte >= 0xF0);
        if (byte >= 0xC0) return n < length ? n : 0;
        if (byte < 0x80) return 0;
    }
    return 0;
}

// The settings of a model that only generates: one sequence of T tokens. Such a model, too, has the moments
// and gradients of training; here they are the smallest possible.
static RunSettings settings_to_generate(const ModelConfig& config, const Recipe& recipe, int64_t T,
                                        ProcessGroup& processes) {
    const bool several = processes.count() > 1;
    const RunSettings settings{
        .config = config,
        .recipe = recipe,
        .optimizer = find_row(optimizers(), "coat", "--optimizer"),
        .B = 1,
        .T = T,
        .keep_masters = recipe.compute_format == Format::FP32,
        .keep_gradients = several,
        .rank = processes.rank(),
        .ranks = processes.count(),
        .communicator = several ? &processes : nullptr,
    };
    require_supported(settings);
    return settings;
}

// The most tokens that the model sees: --seq, or as many as in the run that saved it.
static int64_t longest_seen(const Flags& flags, const std::string& folder) {
    if (flags.given("seq")) return flags.seq;
    const bool is_checkpoint = find_checkpoint(folder) == folder;
    return is_checkpoint ? read_saved_run(folder).flags.at("seq").get<int64_t>() : INT32_MAX;
}

// Prints the prompt, and what the model continues it with: each token as soon as it is drawn, but a character
// only when all its bytes are.
static void print_continuation(Model& model, const Flags& flags, ProcessGroup& processes,
                               std::vector<int32_t>& tokens) {
    const SamplingOptions drawing{
        .temperature = flags.temperature, .most = flags.new_tokens, .seed = uint64_t(flags.seed)};
    std::string pending = flags.prompt;    // what is not printed yet
    const auto print = [&](size_t kept) {  // all of it but the last `kept` bytes
        const std::string whole = pending.substr(0, pending.size() - kept);
        std::fputs(printable(whole, "\n\t").c_str(), stdout);
        std::fflush(stdout);
        pending.erase(0, whole.size());
    };
    print(incomplete_end(pending));
    generate_tokens(model, processes, drawing, tokens, [&] {
        pending += char(tokens.back());
        print(incomplete_end(pending));
    });
    print(0);
    std::printf("\n");
}

// It computes in BF16, as other programs do with such a folder: FP8 makes training cheaper, and its rounding
// would only change the answer. --recipe names another recipe.
void answer_prompt(const Flags& flags, ProcessGroup& processes) {
    const std::string named = flags.resumes() ? flags.resume : flags.model;
    if (!fs::is_directory(named))
        throw Error(
            "--prompt needs a trained model; give --model and the folder of a run, a checkpoint or a ",
            "Hugging Face model.");
    const std::string folder = model_in(named);
    const Recipe recipe = find_row(recipes(), flags.given("recipe") ? flags.recipe : "bf16", "--recipe");
    const ModelConfig config = read_model_config(folder);
    require_bytes(folder, config);
    std::vector<int32_t> tokens = tokens_of(flags.prompt);
    const auto prompt = int64_t(tokens.size());
    const int64_t limit = std::min(longest_seen(flags, folder), config.longest_sequence());
    const int64_t T = std::min(limit, prompt + flags.new_tokens);
    const RunSettings settings = settings_to_generate(config, recipe, T, processes);
    if (prompt > limit)
        print_error(concat("The model sees the last ", limit, " of the prompt's ", prompt, " tokens."));
    require_weights(folder, config);
    const std::unique_ptr<Model> model =
        flags.on_gpu() ? make_gpu_model(settings) : make_reference_model(settings);
    load_weights(folder, *model);

    print_continuation(*model, flags, processes, tokens);
}

}  // namespace coat

// train.cpp - the program: flags in, a trained model out. First comes what a run is made of (Run) and its
// whole course (run_program); then each stage in its turn, up to the training loop and what happens between
// its steps. There is no CUDA here and no file format.
#include "flags.h"

#include <fcntl.h>
#include <omp.h>
#include <sys/file.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>

#include "../data/checkpoint.h"
#include "../data/tokens.h"
#include "../model.h"
#include "log.h"
#include "generate.h"
#include "ranks.h"

namespace {

using namespace coat;

// -----------------------------------------------------------------------------------------------------------
// What ./train does

// What a run is made of. run_program() completes it, stage by stage.
struct Run {
    Flags flags;
    Setup setup{};
    ProcessGroup* processes = nullptr;  // all ranks, also if there is only this one
    std::string no_gpu;  // why this process has no GPU; empty if it has one, or if --device cpu asks for none
    std::string weights;       // the folder that the run starts from, or continues; empty: random weights
    LoopState state;           // its settings are those of the run that is continued, until require_same()
    FileContents other_files;  // of `weights`, for the checkpoints
    std::vector<std::string> outputs;  // the files that standard output and error go to, if they are files
    Corpus corpus;
    std::unique_ptr<Model> model;
    RunLog log;                            // of rank 0
    std::vector<int32_t> tokens, targets;  // micro-batches (B, T)
    bool out_is_locked = false;            // --out existed before this run, and is locked
    bool unsaved = false;  // the model is at the end of a step that may be saved, and is in no checkpoint

    int64_t batch_tokens() const { return setup.B * setup.T; }
    int64_t step_tokens() const { return micro_batches(setup) * batch_tokens(); }
    bool on_gpu() const { return flags.device == "gpu"; }  // also if this is a plan, and there is no GPU
    bool is_rank_0() const { return setup.rank == 0; }

    void print_log(const char* kind, const Json& fields) { log.print(kind, state.step, fields); }
};

// The stages of a run, in the order in which run_program() comes to them. They are defined in this order
// below.
void start_ranks(Run& run, std::unique_ptr<ProcessGroup>& processes);
void choose_device(Run& run);
void answer_prompt(const Run& run);

void find_resumed(Run& run);
void take_checkpoint(Run& run);
bool is_complete(const Run& run);
void make_setup(Run& run);
void check_out_folder(Run& run);
void require_own_folder(const Run& run);
void create_out_folder(const Run& run);
bool saves_checkpoints(const Flags& flags);
Json load_data(Run& run);
void require_same(Run& run, const Json& data);
void print_start(const Run& run);
Setup setup_of_last_rank(const Run& run);

void make_model(Run& run);
void log_settings(Run& run);
void finish_step_at_signal();
int train(Run& run);

// What happens between steps. Every rank calls these functions; rank 0 alone prints, logs and saves.
double validation_loss(Run& run);
void sample(Run& run);
void print_quantization(Run& run);
bool save(Run& run, const std::string& folder);
void save_elsewhere(Run& run);

// The whole program. Returns the exit code. `processes` belongs to main(), which after an error tells the
// other ranks of it; and so does `run`: before the others know of the error, its model cannot be destroyed,
// because its GPU may wait for what theirs send.
int run_program(int argc, char** argv, Run& run, std::unique_ptr<ProcessGroup>& processes) {
    const Flags& flags = run.flags;
    run.flags.parse(argc, argv);
    if (flags.help) {
        print_help();
        return 0;
    }
    if (flags.version) {
        print_version();
        return 0;
    }
    start_ranks(run, processes);
    choose_device(run);
    if (flags.given("prompt")) {
        answer_prompt(run);
        return 0;
    }

    // What the run is, and whether it is possible. This takes seconds, and the model after it may take
    // minutes.
    if (flags.given("resume")) {
        find_resumed(run);
        take_checkpoint(run);
        if (is_complete(run)) return 0;
    }
    make_setup(run);
    if (!flags.given("resume")) check_out_folder(run);
    require_own_folder(run);
    const Json data = load_data(run);
    validate(run.setup);
    if (!flags.plan) require_same(run, data);
    print_start(run);
    if (flags.plan) {
        print_plan(setup_of_last_rank(run), run.on_gpu());
        return 0;
    }

    make_model(run);
    log_settings(run);
    if (flags.steps == 0) {
        validation_loss(run);
        print_quantization(run);
        return 0;
    }
    finish_step_at_signal();
    return train(run);
}

}  // namespace

int main(int argc, char** argv) {
    // Standard input, output and error may be closed. Then the next file that is opened, say the log, would
    // get the number of one of them, and what is printed would run into that file. open() takes the lowest
    // number that is free.
    for (const int standard : {0, 1, 2})
        if (::fcntl(standard, F_GETFD) < 0) ::open("/dev/null", O_RDWR);
    // GNU's OpenMP spins after every parallel loop unless it is told otherwise before main. On a busy machine
    // a step then takes several times as long. So the program starts itself again with the setting.
    if (!std::getenv("OMP_WAIT_POLICY")) {
        setenv("OMP_WAIT_POLICY", "passive", 1);
        execv("/proc/self/exe", argv);
    }
    std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // each line appears at once, also in a pipe or a file
    std::signal(SIGXFSZ, SIG_IGN);  // beyond the limit on file sizes a write fails, and gets a message
    std::signal(SIGPIPE, SIG_IGN);  // the run continues when the reader of its output ends
    std::unique_ptr<ProcessGroup> processes;
    Run run;
    std::string sentence;
    try {
        return run_program(argc, argv, run, processes);
    } catch (const std::bad_alloc&) {
        sentence = "The machine's memory ran out; choose a smaller --model, --batch, --seq or --accumulate.";
    } catch (const std::exception& error) {
        sentence = error.what();
    }
    if (processes) processes->fail(sentence);
    print_error(sentence);
    return 1;
}

namespace {

// -----------------------------------------------------------------------------------------------------------
// The processes of the run, and their device

// --ranks starts processes on this machine. A slip such as 999 must not bring it down before a GPU is missed.
void require_cores(int64_t ranks) {
    constexpr int64_t RANKS_PER_CORE = 4;
    const int64_t cores = omp_get_num_procs(), most = RANKS_PER_CORE * cores;
    if (ranks > most)
        throw Error("--ranks ", ranks, " is too many for a machine of ", cores, " cores; use at most ", most,
                    ", ", RANKS_PER_CORE, " for each core.");
}

// The path of the file that a descriptor of this process is open on. If that is no file, the path names none.
std::string path_of_descriptor(int descriptor) {
    std::error_code none;
    return fs::read_symlink(concat("/proc/self/fd/", descriptor), none).string();
}

// Starts or finds the other ranks. Each goes on with the next stage; only rank 0 prints from here on.
void start_ranks(Run& run, std::unique_ptr<ProcessGroup>& processes) {
    const Flags& flags = run.flags;
    const Launch launch = find_launch(flags.given("ranks") ? flags.ranks : 0);
    const bool several = launch.ranks > 1 && !flags.plan;
    if (several && launch.address.empty()) require_cores(launch.ranks);
    run.outputs = {path_of_descriptor(STDOUT_FILENO), path_of_descriptor(STDERR_FILENO)};
    processes = ProcessGroup::start(several ? launch : Launch());
    run.processes = processes.get();
    run.setup.ranks = launch.ranks;
    run.setup.rank = processes->rank();
    run.setup.all_ranks = several ? processes.get() : nullptr;
    const bool prints = launch.rank == 0 && processes->rank() == 0;  // by torchrun, and by --ranks
    if (!prints && !std::freopen("/dev/null", "w", stdout))
        throw Error("/dev/null cannot be opened for writing; make it writable for everyone.");
}

// --device auto becomes cpu or gpu, and flags that are not given get the defaults of a GPU. A plan for a GPU
// needs none.
void choose_device(Run& run) {
    Flags& flags = run.flags;
    if (flags.device != "cpu") run.no_gpu = why_no_gpu(run.processes->local());
    if (flags.device == "gpu" && !run.no_gpu.empty() && !flags.plan)
        throw Error("--device gpu cannot be used: ", run.no_gpu, ".");
    if (flags.device == "auto") flags.device = run.no_gpu.empty() ? "gpu" : "cpu";
    if (run.on_gpu()) flags.take_gpu_defaults();
}

// -----------------------------------------------------------------------------------------------------------
// --prompt

// The newest checkpoint in the folder of a run; else the folder itself, which is a model's.
std::string model_in(const std::string& folder) {
    const std::string newest = find_checkpoint(folder);
    return newest.empty() ? folder : newest;
}

// --prompt: prints how a model continues a text. It computes in BF16, in which folders have their weights,
// and sees as many tokens as in the run that saved it.
void answer_prompt(const Run& run) {
    const Flags& flags = run.flags;
    const std::string named = flags.given("resume") ? flags.resume : flags.model;
    if (!fs::is_directory(named))
        throw Error(
            "--prompt needs a trained model; give --model and the folder of a run, a checkpoint or a ",
            "Hugging Face model.");
    const std::string folder = model_in(named);
    Setup s = run.setup;
    s.recipe = find_row(recipes(), flags.given("recipe") ? flags.recipe : "bf16", "--recipe");
    int64_t longest = flags.given("seq") ? flags.seq : INT32_MAX;
    if (!flags.given("seq") && find_checkpoint(folder) == folder)
        longest = read_loop_state(folder).settings.at("seq");
    const Drawing drawing{
        .temperature = flags.temperature, .most = flags.tokens, .seed = uint64_t(flags.seed)};
    print_continuation(folder, flags.prompt, s, longest, *run.processes, drawing,
                       run.on_gpu() ? make_gpu : make_reference);
}

// -----------------------------------------------------------------------------------------------------------
// --resume

// Finds the checkpoint that --resume names, or the newest in that folder that is whole. Rank 0 reads all of
// it, once the folder is locked, and says what it skips. If the run will save into the same folder, what it
// skips is renamed, so that it does not stand in the way of later checkpoints.
void find_resumed(Run& run) {
    Flags& flags = run.flags;
    const std::string last = find_checkpoint(flags.resume);
    if (last.empty())
        throw Error("--resume ", flags.resume, " has no complete checkpoint; give another folder.");
    if (!flags.given("out")) flags.out = fs::canonical(last).parent_path().string();
    check_out_folder(run);
    WholeCheckpoint found;
    if (run.is_rank_0()) found = find_whole_checkpoint(flags.resume);
    for (const auto& [path, why] : found.skipped) {
        print_error(concat("The checkpoint ", path, " is not whole and is skipped: ", why));
        if (run.out_is_locked && fs::equivalent(fs::path(path).parent_path(), flags.out))
            print_error(concat(path, " is now ", set_aside(path), "."));
    }
    run.weights = run.processes->all_gather(found.path).front();
}

// Takes the state of the checkpoint, and its values of the flags that are not given. The micro-batches of a
// step are divided among the ranks that there are now. If a flag that is given changes the steps to come, the
// run remembers what was changed after which step.
void take_checkpoint(Run& run) {
    Flags& flags = run.flags;
    run.state = read_loop_state(run.weights);
    Json& settings = run.state.settings;
    const int64_t all = settings.at("accumulate"), ranks = run.setup.ranks;
    if (all % ranks)
        throw Error("The run has ", counted(all, "micro-batch"), " a step, which ", counted(ranks, "rank"),
                    " cannot share; use a number of ranks that divides ", all, ".");
    settings["accumulate"] = all / ranks;
    const float planned =  // the learning rate of the next step, without a change
        learning_rate(settings.at("lr"), settings.at("warmup"), settings.at("steps"), run.state.step);
    std::string changes = flags.take_checkpoint(settings);
    if (flags.steps == 0) {  // an evaluation: it takes no steps, and the log is that of the run
        if (!flags.given("log")) flags.log = "";
        return;
    }
    if (changes.empty()) return;
    const float lr = learning_rate(flags.lr, flags.warmup, flags.steps, run.state.step);
    if (lr != planned) {
        char rates[100];
        std::snprintf(rates, sizeof rates, "; the next step's learning rate is %.3e (before: %.3e)", lr,
                      planned);
        changes += rates;
    }
    settings["changes"].push_back(concat("after step ", run.state.step, ": ", changes));
}

// Whether the run that --resume names has made all its steps. If so, this says it, and how to continue.
bool is_complete(const Run& run) {
    const Flags& flags = run.flags;
    if (flags.plan || flags.steps == 0 || run.state.step < flags.steps) return false;
    std::printf("The run is complete: %s is its step %ld. To continue it, give --steps above %ld.\n",
                printable(run.weights).c_str(), run.state.step, run.state.step);
    return true;
}

// -----------------------------------------------------------------------------------------------------------
// What the run is: its setup, the folder for its checkpoints, and its data

// Finds the rows of tables that the flags choose; Error if there is none of that name. An optimizer that was
// not given is written into its flag.
void make_setup(Run& run) {
    Flags& flags = run.flags;
    Setup& s = run.setup;
    s.recipe = find_row(recipes(), flags.recipe, "--recipe");
    if (flags.optimizer.empty()) flags.optimizer = s.recipe.optimizer;
    s.optimizer = find_row(optimizers(), flags.optimizer, "--optimizer");
    if (flags.attention == "groups") s.recipe.attention = E4M3_GROUP;
    s.master = flags.master == "exact";
    s.keep_gradients = flags.gradients == "kept";
    if (!s.keep_gradients && flags.clip > 0 && s.ranks == 1)
        throw Error("--gradients none updates before the norm of all gradients is known; give --clip 0.");
    // A run that continues has the shape of its checkpoint.
    if (run.weights.empty() && fs::is_directory(flags.model)) {
        run.weights = model_in(flags.model);
        flags.take_folder_defaults();
        for (const ModelConfig& c : models())
            if (c.name == flags.model)
                throw Error("--model ", c.name, " is also a folder; write ./", c.name, " for the folder.");
    }
    s.config =
        run.weights.empty() ? find_row(models(), flags.model, "--model") : read_model_config(run.weights);
    s.B = flags.batch;
    s.accumulate = flags.accumulate;
    s.seed = uint64_t(flags.seed);
    if (run.on_gpu() && run.no_gpu.empty())  // an older GPU lacks FP8 GEMMs
        s.recipe = recipe_on_gpu(s.recipe, gpu_capability());
}

bool saves_checkpoints(const Flags& flags) { return !flags.out.empty() && !flags.plan && flags.steps > 0; }

// Locks the folder until the program ends: two runs would remove each other's checkpoints.
void lock_folder(const std::string& out) {
    const int folder = ::open(out.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0 || ::access(out.c_str(), W_OK) != 0)
        throw Error("--out ", out, " cannot be written (", std::strerror(errno), "); choose another folder.");
    if (::flock(folder, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        throw Error("--out ", out, " is the folder of another run that is going on; choose another folder.");
}

// Error if the folder cannot be created later: if the folder that it would be in, or the nearest one above
// that exists, is a file, or must not be written.
void require_creatable(const std::string& out) {
    fs::path above = fs::absolute(out).lexically_normal();
    std::error_code none;
    while (!fs::exists(above, none) && above.has_relative_path()) above = above.parent_path();
    if (!fs::is_directory(above, none))
        throw Error("--out ", out, " cannot be created: ", above.string(),
                    " is not a folder; choose another folder.");
    if (::access(above.c_str(), W_OK) != 0)
        throw Error("--out ", out, " cannot be created in ", above.string(), " (", std::strerror(errno),
                    "); choose another folder.");
}

// Checks the folder for checkpoints before data are read and a model is made, which can take minutes. A
// folder that exists is locked from here on. One that does not exist is created when the first step begins:
// so a run that fails at its start leaves none.
void check_out_folder(Run& run) {
    const Flags& flags = run.flags;
    if (!saves_checkpoints(flags)) return;
    run.out_is_locked = fs::exists(flags.out);
    if (run.is_rank_0() && run.out_is_locked) lock_folder(flags.out);
    else if (run.is_rank_0()) require_creatable(flags.out);
    run.processes->all_gather(0);  // the others wait for rank 0
}

// A new run must not use the folder of another run's checkpoints.
void require_own_folder(const Run& run) {
    const Flags& flags = run.flags;
    if (!saves_checkpoints(flags)) return;
    const std::string newest = find_checkpoint(flags.out);
    if (newest.empty() || (flags.given("resume") && fs::equivalent(newest, run.weights))) return;
    throw Error("--out ", flags.out, " already holds the checkpoint ", newest, "; continue it with --resume ",
                flags.out, ", or choose another folder with --out.");
}

void create_out_folder(const Run& run) {
    if (!saves_checkpoints(run.flags) || !run.is_rank_0() || run.out_is_locked) return;
    create_folders(run.flags.out);
    lock_folder(run.flags.out);
    require_own_folder(run);  // another run may have come first
}

// The files of the data as a checkpoint lists them, a line for each, so that a message can name the one that
// was changed. If there are very many, the list is empty: each checkpoint would have it.
std::vector<std::string> data_lines(const Run& run) {
    constexpr size_t MOST_FILES = 10'000;
    std::vector<std::string> lines;
    if (run.corpus.files.size() <= MOST_FILES)
        for (const DataFile& file : run.corpus.files) lines.push_back(file.line());
    return lines;
}

// The inverse of data_lines().
std::vector<DataFile> data_files(const Json& lines) {
    std::vector<DataFile> files;
    for (const Json& line : lines) files.push_back(DataFile::from_line(line));
    return files;
}

// Which files of --data are no data: what the ranks of this run write, and files that were not there when the
// run began.
CorpusOptions corpus_options(Run& run) {
    const Flags& flags = run.flags;
    CorpusOptions options;
    std::vector<std::string> written = run.outputs;
    written.push_back(flags.log);
    written.push_back(flags.out);
    for (const std::string& path : written)
        for (const std::string& theirs : run.processes->all_gather(path)) options.written.push_back(theirs);
    const Json& before = run.state.settings;
    if (!flags.resume.empty() && flags.data == before.at("data").get<std::string>())
        options.known = data_files(before.value("data_files", Json::array()));
    return options;
}

// The bytes of a text are the tokens of a model only if the model has no tokenizer of any kind.
void require_no_tokenizer(const std::string& model, const std::string& data) {
    const std::string sentence = concat("--data contains bytes of text, which are no tokens of ", model);
    const std::string tokenizer = tokenizer_in(model);
    if (!tokenizer.empty())
        throw Error(sentence, ": it has a tokenizer (", tokenizer, "); python3 data/tokenize.py --tokenizer ",
                    model, " --out tokens ", data, " makes token files, which --data tokens reads.");
    if (fs::exists(path_in(model, "tokenizer.bin")))
        throw Error(sentence,
                    ": it was trained on token files, whose tokenizer.bin it has; make token files of ",
                    "the text with the same tokenizer (data/tokenize.py).");
}

// Reads the data. A model without a vocabulary size takes that of the data, or of bytes. If --seq is not
// given, it becomes the length of packed conversations, or else the default, or the longest that the model
// can have. Returns what the data are: sizes and hashes.
Json load_data(Run& run) {
    Flags& flags = run.flags;
    ModelConfig& config = run.setup.config;
    if (!flags.plan || flags.given("data")) run.corpus = load_corpus(flags.data, corpus_options(run));
    const TokenStream::Facts train = run.corpus.train.facts(), held_out = run.corpus.validation.facts();
    const int64_t in_use = std::max(train.largest, held_out.largest) + 1;  // 0: there are no data
    const int64_t packed = run.corpus.seq;                                 // 0: the data are not packed
    if (config.V == 0) config.V = in_use ? std::max(in_use, run.corpus.vocabulary.size()) : 256;
    if (run.corpus.bytes && !run.weights.empty()) require_no_tokenizer(run.weights, flags.data);
    if (in_use > config.V)
        throw Error("--data contains token ", in_use - 1, ", but ", config.name, " has ", config.V,
                    " tokens; make token files with its tokenizer (data/tokenize.py).");
    if (!flags.given("seq") && flags.resume.empty())
        flags.seq = packed ? packed : std::min(flags.seq, config.longest_sequence());
    if (packed && packed != flags.seq)
        throw Error("--data was packed for --seq ", packed, ", not ", flags.seq, "; give --seq ", packed,
                    ", or make it again with data/tokenize.py.");
    run.setup.T = flags.seq;
    return {{"train", concat(run.corpus.train.size(), " tokens, hash ", train.hash)},
            {"held out", concat(run.corpus.validation.size(), " tokens, hash ", held_out.hash)}};
}

// Error if the ranks have different data, or if this run has other data than the one that it continues.
// `found`, from load_data(), shows whether they differ, and the lists of files show in which file.
void require_same_data(const Run& run, const Json& found) {
    const auto why = [](const Json& there, const Json& here) {
        const std::string text = difference(data_files(there), data_files(here));
        return text.empty() ? "its tokens are not the same" : text;
    };
    const Json mine = data_lines(run);
    const Json& before = run.state.settings;
    const std::vector<std::string> of_ranks = run.processes->all_gather(found.dump());
    if (std::count(of_ranks.begin(), of_ranks.end(), of_ranks[0]) < run.setup.ranks) {
        const std::vector<std::string> lists = run.processes->all_gather(mine.dump());
        for (size_t rank = 1; rank < of_ranks.size(); rank++)
            if (of_ranks[rank] != of_ranks[0])
                throw Error("Rank ", rank, " has other --data than rank 0: ",
                            why(Json::parse(lists[0]), Json::parse(lists[rank])),
                            "; give all ranks the same.");
    }
    if (run.flags.resume.empty()) return;
    const Json& found_before = before.at("data_found");
    if (found.at("train") != found_before.at("train") || found.at("held out") != found_before.at("held out"))
        throw Error("--data is not that of the checkpoint's run: ",
                    why(before.value("data_files", Json::array()), mine), "; restore it.");
}

// Error if a value of `theirs` differs in `mine`. `who` begins the sentence.
void require_equal(const std::string& who, const Json& mine, const Json& theirs) {
    for (const auto& [name, value] : theirs.items())
        if (mine.contains(name) && mine[name] != value)
            throw Error(who, " in ", name, " (", mine[name].dump(), ", there ", value.dump(),
                        "); give the same flags, data and model.");
}

// Error if ranks differ in a flag, in data or in the model, or if this run has other data than the one that
// it continues: the saved state would mean something else. Then writes what checkpoints keep into
// run.state.settings.
void require_same(Run& run, const Json& data) {
    require_same_data(run, data);
    Json settings = run.flags.saved_settings();
    Json mine = settings;
    mine["resume"] = run.weights;
    mine["device"] = run.flags.device;
    // Another machine may have other files under the same name. So the first rank of each hashes them.
    const std::vector<int> local = run.processes->all_gather(run.processes->local());
    const bool several_machines = std::count(local.begin(), local.end(), 0) > 1;
    if (several_machines && run.processes->local() == 0 && !run.weights.empty())
        for (const auto& file : fs::directory_iterator(run.weights))
            if (file.is_regular_file())
                mine["weights_found"][file.path().filename()] = hash_file(file.path());
    // A path may have bytes that are not UTF-8.
    const std::vector<std::string> all =
        run.processes->all_gather(mine.dump(-1, ' ', false, Json::error_handler_t::replace));
    for (size_t rank = 1; rank < all.size(); rank++)
        require_equal(concat("Rank ", rank, " differs from rank 0"), Json::parse(all[rank]),
                      Json::parse(all[0]));
    settings["data_found"] = data;
    settings["data_files"] = data_lines(run);
    settings["accumulate"] = micro_batches(run.setup);  // a checkpoint knows nothing of ranks
    settings["changes"] = run.state.settings.value("changes", Json::array());
    const std::string started = run.processes->all_gather(utc_now()).front();
    settings["run_started"] = run.state.settings.value("run_started", started);
    run.state.settings = settings;
}

// -----------------------------------------------------------------------------------------------------------
// The start

// The end of the start-up line of the log: what becomes of a file that exists, or why a new one begins.
const char* log_before(const Run& run) {
    if (fs::exists(run.flags.log)) return "; what the file has stays, new lines follow it";
    const bool restored = !run.flags.resume.empty() && !run.flags.given("log");
    return restored ? "; the file of the checkpoint's run is not here, so it begins anew" : "";
}

// The last rank keeps most.
Setup setup_of_last_rank(const Run& run) {
    Setup last = run.setup;
    last.rank = last.ranks - 1;
    return last;
}

// The device, and why it is no GPU.
std::string device_text(const Run& run) {
    if (run.no_gpu.empty()) return run.flags.device;
    return (run.on_gpu() ? "gpu, of which this machine has none: " : "cpu: ") + run.no_gpu;
}

// Prints what is good to know before the first step.
void print_start(const Run& run) {
    const Setup s = setup_of_last_rank(run);
    const ModelConfig& c = s.config;
    const auto print = [](const auto&... parts) { std::printf("%s\n", printable(concat(parts...)).c_str()); };
    print("model: ", c.name, ", ", grouped(parameter_count(c)), " parameters: ", counted(c.L, "layer"),
          ", hidden size ", c.C, ", ", counted(c.NH, "head"), ", vocabulary ", c.V, "; ",
          run.weights.empty() ? "random weights" : "weights of " + run.weights);
    print("recipe: ", recipe_text(s));
    print("optimizer: ", s.optimizer.name, ": ", s.optimizer.about,
          s.master ? "; FP32 master weights" : "; no master weights, rounded stochastically");
    print("device: ", device_text(run));
    print("batch: ", grouped(run.step_tokens()), " tokens, ", counted(micro_batches(s), "micro-batch"),
          " of ", s.B, " x ", s.T, s.ranks > 1 ? " on " + counted(s.ranks, "rank") : "");
    if (const int64_t warmup = warmup_steps(run.flags.warmup, run.flags.steps); warmup < run.flags.warmup)
        print("warm-up: ", counted(warmup, "step"), ", a tenth of the run, since --warmup ", run.flags.warmup,
              " is longer than --steps ", run.flags.steps);
    if (!run.flags.plan) {
        const std::vector<MemoryRow> plan = run.on_gpu() ? gpu_memory_plan(s) : memory_plan(s);
        print("memory: ", gigabytes(total_bytes(plan)), " GB", s.ranks > 1 ? " on each rank" : "",
              run.on_gpu() ? "" : ", without working memory", "; --plan lists it");
        print("checkpoints: ", saves_checkpoints(run.flags) ? "in " + run.flags.out : "none are saved");
    }
    if (!run.flags.resume.empty()) print("continuing step ", run.state.step, " of ", run.weights);
    if (const Corpus& text = run.corpus; text.train.size())
        print("text: ", run.flags.data, ", ", grouped(text.train.size()), " tokens to train on, ",
              grouped(text.validation.size()), " held out");
    if (run.corpus.bytes && !run.weights.empty() && c.V > 256)
        print("text: its bytes are the tokens, since ", run.weights, " has no tokenizer");
    for (const std::string& sentence : sentences_of(run.corpus.left_out)) print(sentence);
    if (!run.flags.log.empty()) print("log: ", run.flags.log, log_before(run));
    const Json changes = run.state.settings.value("changes", Json::array());
    for (const Json& change : changes) print("changed: ", change.get<std::string>());
    if (!changes.empty())
        print("So the weights are not those of a run that had these flags from its first step.");
    std::printf("\n");
}

// The tokenizer and other files that checkpoints have besides the model. A model without a tokenizer of its
// own gets the tokenizer.bin of the token files, so that --prompt can use it.
void take_other_files(Run& run) {
    if (!run.weights.empty()) run.other_files = read_other_files(run.weights);
    const std::string& pieces = run.corpus.vocabulary_file;
    const bool has_tokenizer = !run.weights.empty() && !tokenizer_in(run.weights).empty();
    if (!pieces.empty() && !has_tokenizer) run.other_files["tokenizer.bin"] = MappedFile(pieces).text();
    add_tokenizer(run.corpus.tokenizer_folder, &run.other_files);
}

// Makes the model, with the weights of a checkpoint or of a folder, or with random ones. What can be wrong
// with files is found before, because this can take minutes.
void make_model(Run& run) {
    if (!run.weights.empty()) check_weights(run.weights, run.setup.config);
    if (run.is_rank_0()) take_other_files(run);
    if (!run.flags.log.empty() && run.is_rank_0()) run.log.open(run.flags.log);
    run.model = run.on_gpu() ? make_gpu(run.setup) : make_reference(run.setup);
    if (!run.flags.resume.empty()) load_checkpoint(run.weights, *run.model);
    else if (!run.weights.empty()) load_weights(run.weights, run.setup.config, run.model.get());
}

// Every start of ./train begins its lines of the log with its flags.
void log_settings(Run& run) {
    Json settings = {{"date", utc_now()}, {"run_started", run.state.settings["run_started"]}};
    settings.update(run.flags.all_settings());
    settings["parameters"] = parameter_count(run.setup.config);
    settings["ranks"] = run.setup.ranks;
    run.print_log("settings", settings);
}

// From here on a signal ends the run after the current step, which is saved. A second signal changes nothing,
// because `timeout` sends two; a third ends the program at once. Under nohup, hangups stay ignored.
void finish_step_at_signal() {
    for (int signal : {SIGINT, SIGTERM, SIGHUP}) {
        const auto before = std::signal(signal, [](int received) {
            if (interrupted) std::signal(received, SIG_DFL);
            interrupted = received;
        });
        if (signal == SIGHUP && before == SIG_IGN) std::signal(signal, SIG_IGN);
    }
}

// -----------------------------------------------------------------------------------------------------------
// The training loop

// Where the loop is in the run. Times are those of now(), in seconds.
struct Progress {
    int64_t first_step;        // the steps that the run had made when this program started
    double started, saved_at;  // when the loop began, and when it last saved
    double timed = 0;          // the duration of all steps but the first, which warms caches
    int skipped_in_a_row = 0;  // the number of steps that were skipped, up to the last one
};

void take_step(Run& run, const Loader& loader, Progress& progress);
int end_at_signal(Run& run, int signal);
int finish(Run& run, const Progress& progress);

// The length of a minute in seconds. Tests make it shorter, because no test can wait for half an hour.
double minute() {
    const char* const text = std::getenv("COAT_MINUTE");
    return text ? std::atof(text) : 60;
}

// What has happened during a step, from outside. All ranks must do the same, so a signal to one of them stops
// all, and the clock is that of rank 0.
struct Events {
    int signal;  // 0: none
    bool half_hour_is_over;
};
Events events_on_all_ranks(Run& run, const Progress& progress) {
    const Events mine{.signal = interrupted, .half_hour_is_over = now() - progress.saved_at >= 30 * minute()};
    Events all = mine;
    const std::vector<Events> of_ranks = run.processes->all_gather(mine);
    for (const Events& theirs : of_ranks) all.signal = std::max(all.signal, theirs.signal);
    all.half_hour_is_over = of_ranks[0].half_hour_is_over;
    return all;
}

// Trains until --steps, or until a signal comes. Every rank goes through this loop. Returns the exit code.
int train(Run& run) {
    const Flags& flags = run.flags;
    const Loader loader(run.corpus.train, run.setup.B, run.setup.T, run.setup.seed);
    if (!flags.out.empty())
        run.processes->checkpoint = find_checkpoint(flags.out);  // errors name it from here on
    if (run.state.step == 0) run.state.first_validation = validation_loss(run);
    create_out_folder(run);
    Progress progress{.first_step = run.state.step, .started = now(), .saved_at = now()};
    const auto every = [&](int64_t steps) { return steps > 0 && run.state.step % steps == 0; };
    while (run.state.step < flags.steps) {
        take_step(run, loader, progress);
        const bool last = run.state.step == flags.steps;  // finish() validates and saves it
        const Events events = events_on_all_ranks(run, progress);
        if (events.signal && !last) return end_at_signal(run, events.signal);
        if (!last && every(flags.eval_every)) validation_loss(run);
        if (flags.sample_every > 0 && (last || every(flags.sample_every))) sample(run);
        const bool saves = flags.save_every > 0 ? every(flags.save_every) : events.half_hour_is_over;
        if (!last && saves && progress.skipped_in_a_row == 0) {
            save(run, flags.out);
            progress.saved_at = now();
        }
    }
    return finish(run, progress);
}

// "3m28s" or "5h7m".
std::string duration(double seconds) {
    const int64_t whole = std::llround(seconds), minutes = whole / 60;
    if (minutes < 60) return concat(minutes, "m", whole % 60, "s");
    return concat(minutes / 60, "h", minutes % 60, "m");
}

// Prints and logs a step. It took `took` seconds; the rest of the run will take `left`, with validations,
// samples and saves. Tokens and floating-point operations a second are those of all ranks.
void print_step(Run& run, const StepResult& result, float lr, double took, double left) {
    const int64_t step = run.state.step, steps = run.flags.steps;
    const double rate = run.step_tokens() / took;
    const double tflops = flops_per_token(run.setup.config, run.setup.T) * rate * 1e-12;
    const char* note = "";
    if (result.skipped) note = result.targets ? " | skipped: not finite" : " | skipped: no token counts";
    std::printf(
        "step %*ld/%ld | loss %.4f | norm %.4f | lr %.3e | %.0f ms | %.0f tok/s | %.3g TFLOP/s | %s left%s\n",
        int(std::to_string(steps).size()), step, steps, result.loss, result.grad_norm, lr, took * 1e3, rate,
        tflops, duration(left).c_str(), note);
    run.print_log("step", {{"skipped", result.skipped},
                           {"loss", result.loss},
                           {"grad_norm", result.grad_norm},
                           {"lr", lr},
                           {"ms", took * 1e3},
                           {"tokens_per_second", rate},
                           {"tflops", tflops}});
}

// Calls `read`, which fills run.tokens and run.targets. If it fails on one rank, say because a file was cut,
// all ranks save the last complete step and get an Error.
void read_on_all_ranks(Run& run, const std::function<void()>& read) {
    std::string error;
    try {
        read();
    } catch (const Error& failure) {
        error = failure.what();
    }
    for (const std::string& found : run.processes->all_gather(error)) {
        if (found.empty()) continue;
        if (run.unsaved && !save(run, run.flags.out)) save_elsewhere(run);
        throw Error(found);
    }
}

// Reads the micro-batches of the next step that this rank computes. The ranks take them in turn: so one rank
// with a larger --accumulate reads the same ones in a step.
void read_step(Run& run, const Loader& loader) {
    const Setup& s = run.setup;
    const int64_t n = run.batch_tokens(), first = run.state.step * micro_batches(s) + s.rank;
    run.tokens.resize(s.accumulate * n);
    run.targets.resize(s.accumulate * n);
    read_on_all_ranks(run, [&] {
        for (int64_t i = 0; i < s.accumulate; i++)
            loader.read(first + i * s.ranks, &run.tokens[i * n], &run.targets[i * n]);
    });
}

// One optimizer step: reads its micro-batches, updates the model, and prints.
void take_step(Run& run, const Loader& loader, Progress& progress) {
    constexpr int MOST_SKIPPED = 20;  // steps in a row: then the run has diverged
    const Flags& flags = run.flags;
    LoopState& state = run.state;
    const double before = now();
    const AdamW adamw{.step = state.updates + 1,
                      .lr = learning_rate(flags.lr, flags.warmup, flags.steps, state.step),
                      .weight_decay = float(flags.weight_decay),
                      .clip = float(flags.clip),
                      .skipped = state.step - state.updates};
    read_step(run, loader);
    run.unsaved = false;  // an error within the step leaves weights of two steps
    const StepResult result = run.model->step(run.tokens.data(), run.targets.data(), adamw);

    // A skipped step counts for the schedule and the data, or it would come again. It does not count for the
    // bias correction, nor, if its text has no targets, as a sign that the run diverges.
    state.step++;
    if (!result.skipped) {
        state.updates++;
        progress.skipped_in_a_row = 0;
    } else if (result.targets) {
        progress.skipped_in_a_row++;
    }
    // A skip may mean that weights have overflowed. They must not replace a good checkpoint.
    run.unsaved = progress.skipped_in_a_row == 0 || run.processes->checkpoint.empty();

    const double took = now() - before;
    const double made = double(state.step - progress.first_step);
    if (made > 1) progress.timed += took;
    const double left = (now() - progress.started) / made * double(flags.steps - state.step);
    print_step(run, result, adamw.lr, took, left);
    if (progress.skipped_in_a_row == MOST_SKIPPED)
        throw Error("The loss or a gradient was not finite in ", MOST_SKIPPED,
                    " steps in a row; begin again with a lower --lr, or with other weights.");
}

// Saves the last step of a run. If that fails, it is tried again every minute, ten times; then, or after a
// signal, the step is saved in another folder. Returns the exit code: 0 if --out has the checkpoint, else
// that of the signal, or 1.
int save_last(Run& run) {
    constexpr int TRIES = 10;
    interrupted = 0;
    int signal = 0;
    for (int tries = 0; !save(run, run.flags.out); tries++) {
        if (signal || tries == TRIES) {
            save_elsewhere(run);
            return signal ? 128 + signal : 1;
        }
        if (run.is_rank_0())
            print_error(concat("The run tries again in a minute (", tries + 1, " of ", TRIES,
                               "); after the last try, or Ctrl-C, it saves to another folder."));
        usleep(useconds_t(minute() * 1e6));  // or less, if a signal comes
        for (int theirs : run.processes->all_gather(int(interrupted))) signal = std::max(signal, theirs);
    }
    return 0;
}

// Saves the step after which a signal has come, and says how the run can go on. Returns the exit code.
int end_at_signal(Run& run, int signal) {
    if (run.unsaved) save_last(run);
    std::string what = "; nothing was saved.";
    const fs::path checkpoint = run.processes->checkpoint;
    if (!checkpoint.empty()) what = ": continue with --resume " + checkpoint.parent_path().string();
    std::printf("Interrupted after step %ld%s\n", run.state.step, printable(what).c_str());
    return 128 + signal;
}

// Validates and saves the last step, and prints what the run was. Returns the exit code.
int finish(Run& run, const Progress& progress) {
    const LoopState& state = run.state;
    const double validation = validation_loss(run);
    const int code = save_last(run);
    print_quantization(run);
    const int64_t steps = state.step - progress.first_step, skipped = state.step - state.updates;
    Json end = {
        {"first_validation", state.first_validation}, {"validation", validation}, {"skipped", skipped}};
    std::printf("\nDone: %s in %s", counted(steps, "step").c_str(),
                duration(now() - progress.started).c_str());
    if (steps > 1) {
        const double rate = double(run.step_tokens() * (steps - 1)) / progress.timed;
        std::printf(", %.0f tok/s", rate);
        end["tokens_per_second"] = rate;
    }
    std::printf("; %ld skipped. Validation loss %.4f -> %.4f nats per token.\n", skipped,
                state.first_validation, validation);
    run.print_log("end", end);
    const std::string& checkpoint = run.processes->checkpoint;
    const std::string folder = fs::path(checkpoint).parent_path().string();
    const std::string command = command_to_try(folder, checkpoint, run.setup.config);
    if (!command.empty()) std::printf("To use the model: %s\n", printable(command).c_str());
    return code;
}

// -----------------------------------------------------------------------------------------------------------
// What happens between steps: validation, samples, the report on quantization, and saving

// The held-out text as windows of --seq tokens. Their order is the same in every run.
Loader held_out(const Run& run) { return {run.corpus.validation, 1, run.setup.T, 0}; }

// How many of these windows are evaluated: --eval-tokens, or all that there are. The number depends neither
// on --batch nor on the number of ranks, and so the loss does not.
int64_t evaluated_windows(const Run& run, const Loader& windows) {
    return std::clamp<int64_t>(run.flags.eval_tokens / run.setup.T, 1, windows.windows());
}

// Reads micro-batch `number` of the evaluated windows. If fewer than B windows are left for it, or none, a
// window is repeated without targets: it adds nothing to the loss, and brings no values that would change an
// amax.
void read_evaluated(Run& run, const Loader& windows, int64_t number) {
    const int64_t T = run.setup.T, first = number * run.setup.B, count = evaluated_windows(run, windows);
    run.tokens.resize(run.batch_tokens());
    run.targets.resize(run.batch_tokens());
    read_on_all_ranks(run, [&] {
        for (int64_t i = 0; i < run.setup.B; i++) {
            const bool counts = first + i < count;
            const int64_t repeated = first < count ? first : 0;
            windows.read(counts ? first + i : repeated, &run.tokens[i * T], &run.targets[i * T]);
            if (!counts) std::fill_n(&run.targets[i * T], T, NO_TARGET);
        }
    });
}

// Prints and returns the mean loss, in nats, over the targets of the evaluated windows that count. Each rank
// computes its share of the micro-batches. With FP8 operands the last digits of the loss depend on --batch,
// because the values of a micro-batch share a scale.
double validation_loss(Run& run) {
    const Loader windows = held_out(run);
    const int64_t batches = ceil_div(evaluated_windows(run, windows), run.setup.B);
    struct LossSum {
        double loss, targets;
    } sum{0, 0};
    for (int64_t first = 0; first < batches; first += run.setup.ranks) {  // one micro-batch for each rank
        read_evaluated(run, windows, first + run.setup.rank);
        const double targets = double(counted_targets(run.targets.data(), run.batch_tokens()));
        const double mean = run.model->evaluate(run.tokens.data(), run.targets.data());
        const LossSum mine{.loss = mean * targets, .targets = targets};
        for (const LossSum& theirs : run.processes->all_gather(mine)) {
            sum.loss += theirs.loss;
            sum.targets += theirs.targets;
        }
    }
    if (sum.targets == 0) throw Error("No token of the held-out --data counts in the loss; give other data.");
    const double loss = sum.loss / sum.targets;
    if (!std::isfinite(loss))
        throw Error("The validation loss is not finite after step ", run.state.step,
                    "; begin again with a lower --lr, or with other weights.");
    std::printf("validation | step %ld | loss %.4f | %s\n", run.state.step, loss,
                counted(int64_t(sum.targets), "token").c_str());
    run.print_log("validation", {{"loss", loss}, {"tokens", int64_t(sum.targets)}});
    return loss;
}

// Prints how the model continues the beginning of the held-out text. The seed follows from the step, so that
// a resumed run prints the samples of one that was not stopped.
void sample(Run& run) {
    constexpr int64_t LONGEST = 240;
    const int64_t T = run.setup.T;
    std::vector<int32_t> tokens = sample_prompt(run.corpus.validation, T);
    if (tokens.empty()) return;
    const auto prompt = int64_t(tokens.size());
    continue_tokens(*run.model, *run.processes,
                    {.temperature = run.flags.temperature,
                     .most = std::min(T - prompt, LONGEST),
                     .end_token = run.corpus.vocabulary.end_token,
                     .seed = run.setup.seed * 1'000'003 + uint64_t(run.state.step)},
                    tokens);
    const auto text = [&](int64_t begin, int64_t end) {
        const std::vector<int32_t> part(tokens.begin() + begin, tokens.begin() + end);
        return printable(run.corpus.vocabulary.decode(part), "\n\t");
    };
    std::printf(
        "sample | step %ld\n---------- held-out text\n%s\n---------- continued by the "
        "model\n%s\n----------\n",
        run.state.step, text(0, prompt).c_str(), text(prompt, int64_t(tokens.size())).c_str());
    run.print_log("sample", {{"tokens", tokens}, {"prompt", prompt}});
}

// Prints how well FP8 represents each kind of tensor, measured on one micro-batch of held-out text, forward
// and backward. After a run also the moments that its gradients would lead to, each on the rank that keeps
// them, and the expansion factors k in use.
void print_quantization(Run& run) {
    const bool trained = run.flags.steps > 0;  // --steps 0 updates no moments
    read_evaluated(run, held_out(run), 0);     // the same micro-batch on every rank
    QuantReport report = run.model->quantization(run.tokens.data(), run.targets.data());
    for (ReportKind kind : {ReportKind::Moment1, ReportKind::Moment2}) {
        QuantStats sum;
        for (const QuantStats& theirs : run.processes->all_gather(report.kinds[int(kind)])) sum += theirs;
        report.kinds[int(kind)] = trained ? sum : QuantStats();
    }
    bool has_title = false;  // a recipe without FP8 has no rows
    for (size_t kind = 0; kind < std::size(report.kinds); kind++) {
        const QuantStats& s = report.kinds[kind];
        if (s.elements == 0) continue;
        if (!has_title)
            std::printf("\n%-17s | SNR      | quantized   | saturated | flushed to zero\n", "Quantization");
        has_title = true;
        std::printf("%-17s | %5.1f dB | %11ld | %9ld | %ld (%.3f%%)\n", REPORT_KIND_NAMES[kind], s.snr_db(),
                    s.elements, s.saturated, s.flushed, 100.0 * s.flushed / s.elements);
    }
    if (!trained) return;
    if (report.part_of_moments) std::printf("Of large parameters, a part of the moments was measured.\n");
    for (const auto& [name, mine] :
         {std::pair{"first moments", &report.k_m}, {"second moments", &report.k_v}}) {
        std::vector<float> k;
        for (const std::vector<float>& theirs : run.processes->all_gather(*mine))
            k.insert(k.end(), theirs.begin(), theirs.end());
        if (k.empty()) continue;
        std::sort(k.begin(), k.end());
        auto at = [&](double part) { return k[size_t(part * (k.size() - 1))]; };
        std::printf("expansion factor k of %s: smallest %.2f, quartiles %.2f %.2f %.2f, largest %.2f\n", name,
                    at(0), at(0.25), at(0.5), at(0.75), at(1));
    }
}

// Saves a checkpoint in the folder, unless its name is empty. Returns false on all ranks if that cannot be
// done, say because the disk is full. Then rank 0 says why, and the run goes on with the last checkpoint.
bool save(Run& run, const std::string& folder) {
    if (folder.empty()) return true;
    try {
        run.processes->checkpoint =
            save_checkpoint(folder, *run.model, run.state, run.other_files, run.flags.keep);
    } catch (const Error& error) {
        if (run.is_rank_0()) print_error(concat("Step ", run.state.step, " was not saved: ", error.what()));
        return false;
    }
    run.unsaved = false;
    std::printf("saved | step %ld | %s\n", run.state.step, printable(run.processes->checkpoint).c_str());
    return true;
}

// Saves a checkpoint in a new folder where temporary files belong, or else in the working directory. It is
// for a run that ends and cannot write --out: any place is better than to lose its steps.
void save_elsewhere(Run& run) {
    const char* const temporary = std::getenv("TMPDIR");
    for (const std::string place : {temporary ? temporary : "/tmp", "."}) {
        std::string folder = path_in(place, "coat-XXXXXX");
        if (run.is_rank_0() && !::mkdtemp(folder.data())) folder = "";
        folder = run.processes->all_gather(folder).front();
        if (folder.empty()) continue;
        if (save(run, folder)) {
            if (run.is_rank_0())
                print_error("--out " + run.flags.out + " could not be written; move " +
                            run.processes->checkpoint + " there when it can be.");
            return;
        }
        if (run.is_rank_0()) ::rmdir(folder.c_str());
    }
    if (run.is_rank_0())
        print_error(concat("Step ", run.state.step, " is lost: no other folder could be written, either."));
}

}  // namespace

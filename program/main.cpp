// program/main.cpp - the program ./train: flags in, a trained model out. start.h describes most of the
// functions that are called here, in the same order; train() is in train.cpp.
#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <new>

#include "checkpoints.h"
#include "generate.h"
#include "plan.h"
#include "report.h"
#include "resume.h"
#include "start.h"
#include "train.h"

using namespace coat;

// From here on a signal ends the run after the current step, which is saved. A second signal changes nothing,
// because `timeout` sends two; a third ends the program at once. Under nohup, hangups stay ignored.
static void finish_step_at_signal() {
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
        const auto before = std::signal(signal, [](int received) {
            if (signal_received) std::signal(received, SIG_DFL);
            signal_received = received;
        });
        if (signal == SIGHUP && before == SIG_IGN) std::signal(signal, SIG_IGN);
    }
}

// Decides what is trained, and on which data. All that can be refused is refused before the model is made,
// which may take minutes.
static Run prepare_run(Flags flags, const RunLocation& location, const Resumed& resumed, bool out_existed) {
    const ModelAndFormats chosen = choose_model_and_formats(location, resumed, flags);
    require_own_folder(flags, resumed);
    const Corpus corpus = load_data_on_all_ranks(location, flags, resumed);
    flags.seq = choose_sequence_length(flags, chosen.config, corpus);
    const RunSettings settings = make_settings(location, flags, chosen, corpus);
    flags.lr = choose_learning_rate(flags, chosen, settings);
    flags.warmup = choose_warmup(flags);
    // Rank 0 alone writes checkpoints, and a plan writes none.
    FileContents other_files;
    if (settings.rank == 0 && !flags.plan) other_files = find_other_files(chosen.weights_folder, corpus);
    return {.flags = flags,
            .settings = settings,
            .processes = location.processes,
            .why_no_gpu = location.why_no_gpu,
            .weights_folder = chosen.weights_folder,
            .resumed = resumed,
            .corpus = corpus,
            .other_files = other_files,
            .out_existed = out_existed,
            .state = resumed.state};
}

// Trains, or prints a plan. Returns the exit code. The model belongs to main(), because an error must not
// destroy it before the other ranks know of it.
static int run_training(Flags flags, const RunLocation& location, std::unique_ptr<Model>& model) {
    if (flags.resumes() && !flags.given("out")) flags.out = folder_of_resumed(flags);
    const bool out_existed = lock_output_folder_on_all_ranks(flags, location.processes);
    Resumed resumed;
    if (flags.resumes()) {
        resumed = read_resumed(find_resumed_on_all_ranks(flags, out_existed, location.processes));
        take_flags_of_resumed(location.ranks, resumed, flags);
        if (is_complete(resumed, flags)) {
            print_complete(resumed);
            return 0;
        }
    }
    Run run = prepare_run(flags, location, resumed, out_existed);
    if (run.flags.plan) {
        print_start(run);
        print_plan(settings_of_last_rank(run), run.flags.on_gpu());
        return 0;
    }
    run.flags_to_save = flags_to_save_on_all_ranks(run);
    require_same_on_all_ranks(run);
    if (run.flags.resumes()) require_data_of_resumed(run);
    if (!run.flags.on_gpu()) require_memory_for_cpu(run.settings);
    make_loaders(run);
    print_start(run);
    if (!run.weights_folder.empty()) require_weights(run.weights_folder, run.settings.config);
    if (!run.flags.log.empty() && run.is_rank_0()) run.log.open(run.flags.log);

    model = make_model(run);
    run.model = model.get();
    log_flags(run);
    if (run.flags.steps == 0) {
        validate_and_report(run);
        report_quantization(run);
        return 0;
    }
    finish_step_at_signal();
    return train(run);
}

// All that the program does. Returns the exit code.
static int run_program(const std::vector<std::string>& arguments, std::unique_ptr<ProcessGroup>& processes,
                       std::unique_ptr<Model>& model) {
    Flags flags;
    flags.parse(arguments);
    if (flags.help) {
        print_help();
        return 0;
    }
    if (flags.version) {
        print_version();
        return 0;
    }

    const Launch launch = find_launch(flags.given("ranks") ? flags.ranks : 0);
    const std::vector<std::string> output_files = files_of_output();
    processes = start_ranks(launch, flags);
    const std::string why_no_gpu = choose_device(*processes, flags);
    if (flags.on_gpu()) flags.take_gpu_defaults();
    if (!flags.on_gpu()) never_return_memory_to_system();
    if (flags.given("prompt")) {
        answer_prompt(flags, *processes);
        return 0;
    }
    const RunLocation location{.processes = *processes,
                               .ranks = launch.ranks,
                               .why_no_gpu = why_no_gpu,
                               .output_files = output_files};
    return run_training(flags, location, model);
}

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
    std::unique_ptr<Model> model;  // ends before the ranks do: its GPU exchanges with theirs
    std::string sentence;
    try {
        return run_program({argv + 1, argv + argc}, processes, model);
    } catch (const std::bad_alloc&) {
        sentence = "The machine's memory ran out; choose a smaller --model, --batch, --seq or --accumulate.";
    } catch (const std::exception& error) {
        sentence = error.what();
    }
    // The other ranks learn of the error before the model is destroyed: its GPU may wait for theirs.
    if (processes) processes->fail(sentence);
    print_error(sentence);
    return 1;
}

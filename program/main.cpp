// main.cpp - the program ./train: flags in, a trained model out. run_program() has all stages of a run; run.h
// says what each of them does.
#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <new>

#include "plan.h"
#include "run.h"

using namespace coat;

// From here on a signal ends the run after the current step, which is saved. A second signal changes nothing,
// because `timeout` sends two; a third ends the program at once. Under nohup, hangups stay ignored.
static void finish_step_at_signal() {
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
        const auto before = std::signal(signal, [](int received) {
            if (interrupted) std::signal(received, SIG_DFL);
            interrupted = received;
        });
        if (signal == SIGHUP && before == SIG_IGN) std::signal(signal, SIG_IGN);
    }
}

// All that a run does, stage by stage. Returns the exit code.
static int run_program(const std::vector<std::string>& arguments, Run& run) {
    const Flags& flags = run.flags;
    run.flags.parse(arguments);
    if (flags.help) {
        print_help();
        return 0;
    }
    if (flags.version) {
        print_version();
        return 0;
    }
    start_ranks(run);
    choose_device(run);
    if (run.on_gpu()) run.flags.take_gpu_defaults();
    if (flags.given("prompt")) {
        answer_prompt(run);
        return 0;
    }

    // All that can be refused is refused before make_model(), which may take minutes.
    if (run.resumes()) {
        resume(run);
        if (is_complete(run)) {
            print_complete(run);
            return 0;
        }
    }
    make_setup(run);
    choose_model(run);
    if (!run.resumes()) lock_output_folder(run);
    require_own_folder(run);
    load_data(run);
    take_sizes_of_data(run);
    require_supported(run.setup);
    if (!flags.plan) {
        run.state.settings = settings_to_save_on_all_ranks(run);
        require_same_on_all_ranks(run);
        if (run.resumes()) require_data_of_resumed(run);
    }
    print_start(run);
    if (flags.plan) {
        print_plan(setup_of_last_rank(run), run.on_gpu());
        return 0;
    }
    if (!run.weights_folder.empty()) require_weights(run.weights_folder, run.setup.config);
    take_other_files(run);
    if (!flags.log.empty() && run.is_rank_0()) run.log.open(flags.log);

    make_model(run);
    log_settings(run);
    if (flags.steps == 0) {
        report_validation(run);
        report_quantization(run);
        return 0;
    }
    finish_step_at_signal();
    return train(run);
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
    Run run;
    std::string sentence;
    try {
        const int code = run_program({argv + 1, argv + argc}, run);
        run.model.reset();  // before the ranks end: its GPU exchanges with theirs
        return code;
    } catch (const std::bad_alloc&) {
        sentence = "The machine's memory ran out; choose a smaller --model, --batch, --seq or --accumulate.";
    } catch (const std::exception& error) {
        sentence = error.what();
    }
    // The other ranks learn of the error before the model is destroyed: its GPU may wait for theirs.
    if (run.processes) run.processes->fail(sentence);
    print_error(sentence);
    return 1;
}

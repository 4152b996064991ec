// program/checkpoints.cpp - how a run keeps its folder (--out), and saves checkpoints in it.
#include "checkpoints.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "../data/files.h"
#include "clock.h"

namespace coat {

// -----------------------------------------------------------------------------------------------------------
// The folder --out

// Two runs in one folder would remove each other's checkpoints.
static void lock_folder(const std::string& out) {
    const int folder = ::open(out.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0 || ::access(out.c_str(), W_OK) != 0)
        throw Error("--out ", out, " cannot be written (", std::strerror(errno), "); choose another folder.");
    if (::flock(folder, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        throw Error("--out ", out, " is the folder of another run that is going on; choose another folder.");
}

// Error if the folder cannot be created later: if the folder that it would be in, or the nearest one above
// that exists, is a file, or must not be written.
static void require_creatable(const std::string& out) {
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

bool lock_output_folder_on_all_ranks(const Flags& flags, ProcessGroup& processes) {
    if (!flags.saves_checkpoints()) return false;
    const bool exists = fs::exists(flags.out);
    if (processes.rank() == 0 && exists) lock_folder(flags.out);
    else if (processes.rank() == 0) require_creatable(flags.out);
    processes.all_gather(0);  // the others wait for rank 0
    return exists;
}

void require_own_folder(const Flags& flags, const Resumed& resumed) {
    if (!flags.saves_checkpoints()) return;
    const std::string newest = find_checkpoint(flags.out);
    if (newest.empty() || (flags.resumes() && fs::equivalent(newest, resumed.checkpoint))) return;
    throw Error("--out ", flags.out, " already holds the checkpoint ", newest, "; continue it with --resume ",
                flags.out, ", or choose another folder with --out.");
}

void create_and_lock_output_folder(const Run& run) {
    if (!run.flags.saves_checkpoints() || !run.is_rank_0() || run.out_existed) return;
    create_folders(run.flags.out);
    lock_folder(run.flags.out);
    require_own_folder(run.flags, run.resumed);  // another run may have come first
}

// -----------------------------------------------------------------------------------------------------------
// Saving

void note_checkpoint(Run& run, const std::string& checkpoint) {
    run.last_checkpoint = checkpoint;
    run.processes.advice_after_error =
        checkpoint.empty() ? ""
                           : "The last complete checkpoint is " + checkpoint + "; continue it with --resume.";
}

// Saves a checkpoint in a folder. Returns false on all ranks if that cannot be done, say because the disk is
// full. Then rank 0 says why.
static bool save_in(Run& run, const std::string& folder) {
    try {
        const SavedRun saved{.state = run.state, .flags = run.flags_to_save};
        note_checkpoint(run, save_checkpoint(folder, *run.model, saved, run.other_files, run.flags.keep));
    } catch (const Error& error) {
        if (run.is_rank_0()) print_error(concat("Step ", run.state.step, " was not saved: ", error.what()));
        return false;
    }
    run.at_savable_step = false;
    std::printf("saved | step %ld | %s\n", run.state.step, printable(run.last_checkpoint).c_str());
    return true;
}

bool save(Run& run) { return run.flags.out.empty() || save_in(run, run.flags.out); }

// Saves the last step in a new folder of $TMPDIR or /tmp or, if that fails, of the working directory: any
// place is better than losing the step.
static void save_elsewhere(Run& run) {
    const char* const temporary = std::getenv("TMPDIR");
    for (const std::string place : {temporary ? temporary : "/tmp", "."}) {
        std::string folder = path_in(place, "coat-XXXXXX");
        if (run.is_rank_0() && !::mkdtemp(folder.data())) folder = "";
        folder = run.processes.all_gather(folder).front();
        if (folder.empty()) continue;
        if (save_in(run, folder)) {
            if (run.is_rank_0())
                print_error("--out " + run.flags.out + " could not be written; move " + run.last_checkpoint +
                            " there when it can be.");
            return;
        }
        if (run.is_rank_0()) ::rmdir(folder.c_str());
    }
    if (run.is_rank_0())
        print_error(concat("Step ", run.state.step, " is lost: no other folder could be written, either."));
}

int save_last(Run& run) {
    constexpr int TRIES = 10;
    signal_received = 0;
    int signal = 0;
    for (int tries = 0; !save(run); tries++) {
        if (signal || tries == TRIES) {
            save_elsewhere(run);
            return signal ? 128 + signal : 1;
        }
        if (run.is_rank_0())
            print_error(concat("The run tries again in a minute (", tries + 1, " of ", TRIES,
                               "); after the last try, or Ctrl-C, it saves to another folder."));
        ::usleep(useconds_t(seconds_per_minute() * 1e6));  // or less, if a signal comes
        for (int theirs : run.processes.all_gather(int(signal_received))) signal = std::max(signal, theirs);
    }
    return 0;
}

void read_or_fail_together(Run& run, const std::function<void()>& read) {
    std::string error;
    try {
        read();
    } catch (const Error& failure) {
        error = failure.what();
    }
    for (const std::string& found : run.processes.all_gather(error)) {
        if (found.empty()) continue;
        if (run.at_savable_step) save_last(run);
        throw Error(found);
    }
}

}  // namespace coat

// program/checkpoints.h - the folder --out of a run, and the checkpoints that the run saves there
// (checkpoints.cpp).
#pragma once
#include <functional>
#include <string>

#include "run.h"

namespace coat {

// If --out exists, locks it until the program ends. Returns whether it exists. Error if another run has
// locked --out, or if it does not exist and cannot be created. This function comes before data are read and a
// model is made, which can take minutes.
bool lock_output_folder_on_all_ranks(const Flags& flags, ProcessGroup& processes);
// Error if --out has the checkpoints of another run than `resumed`.
void require_own_folder(const Flags& flags, const Resumed& resumed);
// Creates and locks --out if it did not exist. This comes just before the first step, so a run that fails
// earlier leaves no folder.
void create_and_lock_output_folder(const Run& run);

// Sets run.last_checkpoint. From then on an error is followed by "The last complete checkpoint is ...;
// continue it with --resume".
void note_checkpoint(Run& run, const std::string& checkpoint);
// Saves the model and run.state as a checkpoint in --out, unless its name is empty. Returns false if that was
// not possible. Then the run can go on without this checkpoint.
bool save(Run& run);
// Saves the last step of a run. While --out cannot be written, it tries again every minute, so that a user
// can make room. After ten attempts, or a signal, it saves the step in another folder. Returns the exit code:
// 0 if the step is in --out.
int save_last(Run& run);
// Calls `read`, which reads micro-batches. It can fail on one rank alone, say because a file was cut. Then
// all ranks save the last step, and get an Error.
void read_or_fail_together(Run& run, const std::function<void()>& read);

}  // namespace coat

// program/resume.h - how a run continues a checkpoint, --resume (resume.cpp).
#pragma once
#include "run.h"

namespace coat {

std::string folder_of_resumed(const Flags& flags);  // the folder with the checkpoints that --resume continues
// Returns the newest checkpoint in folder_of_resumed() that is whole, and says which newer ones are not
// whole. If the folder is --out, and existed before, it is locked by now. Then the checkpoints that are not
// whole are renamed: they would stand in the way of later ones.
std::string find_resumed_on_all_ranks(const Flags& flags, bool out_existed, ProcessGroup& processes);
Resumed read_resumed(const std::string& checkpoint);
// Sets the flags that are not given as they were in the run that is continued. Notes in resumed.changes how
// the flags that are given change the steps to come; Error if they contradict that run. The micro-batches of
// a step are shared by the ranks that there are now.
void take_flags_of_resumed(int64_t ranks, Resumed& resumed, Flags& flags);
// Whether the run that --resume continues has made all steps of --steps.
bool is_complete(const Resumed& resumed, const Flags& flags);
void print_complete(const Resumed& resumed);
// The newest checkpoint in the folder of a run; else the folder itself, if it is a model's.
std::string model_in(const std::string& folder);

}  // namespace coat

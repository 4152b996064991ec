// start.h - from the command line to a run: the functions that main.cpp calls, in this order, on every rank.
// (A few more are in run.h.) Some of them set flags that were not given: then Flags is not const. A function
// whose name ends with on_all_ranks waits for all ranks, here and in other files: on one rank alone it would
// never return.
#pragma once
#include "run.h"

namespace coat {

// -----------------------------------------------------------------------------------------------------------
// start.cpp: the ranks, and the device of this one

// The files that standard output and error go to. Data are not read from them.
std::vector<std::string> files_of_output();
// Starts or finds the other ranks. From here on only rank 0 prints.
std::unique_ptr<ProcessGroup> start_ranks(const Launch& launch, const Flags& flags);
// --device auto becomes cpu or gpu. Returns why this process can use no GPU; empty if it can, or need not.
std::string choose_device(const ProcessGroup& processes, Flags& flags);
// A setup with the ranks. Its other members are empty.
Setup setup_of_ranks(const Launch& launch, ProcessGroup& processes);

// -----------------------------------------------------------------------------------------------------------
// generate.cpp: --prompt, which needs nothing of what follows

void answer_prompt(const Setup& rank_setup, const Flags& flags, ProcessGroup& processes);

// -----------------------------------------------------------------------------------------------------------
// resume.cpp: --resume

std::string folder_of_resumed(const Flags& flags);  // the folder with the checkpoints that --resume continues
// Finds what --resume continues, and sets the flags that are not given as they were in that run. Renames
// checkpoints in --out that are not whole, if --out is locked.
Resumed resume_on_all_ranks(const Setup& rank_setup, ProcessGroup& processes, bool out_is_locked,
                            Flags& flags);
// Whether the run that --resume continues has made all its steps.
bool is_complete(const Resumed& resumed, const Flags& flags);
void print_complete(const Resumed& resumed);
// The newest checkpoint in the folder of a run; else the folder itself, which is a model's.
std::string model_in(const std::string& folder);

// -----------------------------------------------------------------------------------------------------------
// start.cpp: the model and the data

// The whole setup but the model and the length of sequences, which follow below.
Setup make_setup(const Setup& rank_setup, const std::string& why_no_gpu, Flags& flags);
// The folder that the run starts from: the checkpoint that it continues, or --model; empty if --model names a
// row of the table.
std::string find_weights(const Resumed& resumed, Flags& flags);
ModelConfig choose_model(const std::string& weights_folder, const Flags& flags);
// Reads --data; nothing for a plan, which needs no data. `output_files` are not read.
Corpus load_data_on_all_ranks(const Flags& flags, const Resumed& resumed,
                              const std::vector<std::string>& output_files, ProcessGroup& processes);
// Sets setup.T, and the vocabulary size of a model that has none. Error if the model or --seq do not go with
// the data.
void take_sizes_of_data(const Corpus& data, const std::string& weights_folder, Flags& flags, Setup& setup);
// The tokenizer and other files that checkpoints have besides the model.
FileContents find_other_files(const std::string& weights_folder, const Corpus& corpus);
// What trainer.json keeps of a run: its flags, what its data are, and how it came about.
ordered_json settings_to_save_on_all_ranks(const Run& run);
void require_same_on_all_ranks(const Run& run);  // Error if ranks differ in a flag, in data or in the model
void require_data_of_resumed(const Run& run);    // Error if the run that is continued had other data
std::unique_ptr<Model> make_model(const Run& run);
void log_settings(Run& run);

}  // namespace coat

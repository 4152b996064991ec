// program/start.h - from the command line to a run (start.cpp): functions that main.cpp calls, in this order,
// on every rank. Those of resume.h come between the two sections. Flags that were not given may follow from
// the device, from a checkpoint, from other flags and from the data. The functions that set such flags take
// Flags that are not const.
//
// Here and in other files, a function whose name ends with on_all_ranks waits for all ranks. Called on one
// rank alone it would never return.
#pragma once
#include "run.h"

namespace coat {

// -----------------------------------------------------------------------------------------------------------
// The ranks, and the device of this one

// Where a run takes place.
struct RunLocation {
    ProcessGroup& processes;  // all ranks, even if there is only this one
    int64_t ranks;            // of the run. A plan has one process, whatever the number of ranks.
    std::string why_no_gpu;   // why this process can use no GPU; empty if it can, or need not
    std::vector<std::string> output_files;  // that standard output and error go to: they are no data
};

// The files that standard output and error go to. Comes before start_ranks(), which closes some of the files.
std::vector<std::string> files_of_output();
// Starts or finds the other ranks. From here on only rank 0 prints.
std::unique_ptr<ProcessGroup> start_ranks(const Launch& launch, const Flags& flags);
// --device auto becomes cpu or gpu. Returns RunLocation::why_no_gpu.
std::string choose_device(const ProcessGroup& processes, Flags& flags);
// For a run on the CPU: after this call the allocator of this process returns no memory to the system. Every
// step allocates the same temporary tensors. A third of the time would go into memory that is new to the
// process.
void never_return_memory_to_system();

// -----------------------------------------------------------------------------------------------------------
// The model and the data

// What --model, --recipe and --optimizer name.
struct ModelAndFormats {
    // The folder that the run starts from: the checkpoint that it continues, or --model, or the newest
    // checkpoint in it; empty if --model names a row of the table.
    std::string weights_folder;
    ModelConfig config;  // with the vocabulary size 0 in some rows of the table: make_settings() sets it
    Recipe recipe;       // as this GPU runs it, for the print-outs. make_gpu_model() asks the GPU once more
    OptimizerFormats optimizer;
};
// Sets --optimizer if it is not given. Error if --gradients and --clip contradict each other.
ModelAndFormats choose_model_and_formats(const RunLocation& location, const Resumed& resumed, Flags& flags);
// Reads --data; nothing for a plan, which needs no data.
Corpus load_data_on_all_ranks(const RunLocation& location, const Flags& flags, const Resumed& resumed);
// --seq. If it is not given: the --seq of packed conversations; else the default, or the longest --seq of the
// model if that is shorter. Error if the data are packed for another --seq.
int64_t choose_sequence_length(const Flags& flags, const ModelConfig& config, const Corpus& data);
// Error if the model does not have the tokens of the data, or if the run is not supported.
RunSettings make_settings(const RunLocation& location, const Flags& flags, const ModelAndFormats& chosen,
                          const Corpus& data);
// --lr. If it is not given: the --lr of the run that is continued; else the default for new weights, or for
// weights from a folder.
double choose_learning_rate(const Flags& flags, const ModelAndFormats& chosen, const RunSettings& settings);
// --warmup. If it is not given: the --warmup of the run that is continued; else the default for --steps.
int64_t choose_warmup(const Flags& flags);
// The tokenizer and other files that checkpoints have besides the model. A model without a tokenizer gets the
// tokenizer.bin of the token files, by which tokens of other tokenizers are refused later.
FileContents find_other_files(const std::string& weights_folder, const Corpus& corpus);
// What trainer.json keeps of a run: its flags, what its data are, and how it came about.
ordered_json flags_to_save_on_all_ranks(const Run& run);
void require_same_on_all_ranks(const Run& run);  // Error if ranks differ in a flag, in data or in the model
void require_data_of_resumed(const Run& run);    // Error if the run that is continued had other data
void require_memory_for_cpu(const RunSettings& s);  // Error if the machine has less memory than the run needs
void make_loaders(Run& run);                        // Error if the data have fewer tokens than a micro-batch
// A model with the weights of a checkpoint or of a folder, or with random weights.
std::unique_ptr<Model> make_model(const Run& run);
// Every start of ./train begins its lines of the log with its flags.
void log_flags(Run& run);

}  // namespace coat

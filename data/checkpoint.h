// data/checkpoint.h - model folders and checkpoints (checkpoint.cpp, on safetensors.cpp).
//
// A checkpoint is a Hugging Face model folder (config.json, model.safetensors in BF16) that transformers opens as it is. Beside
// the weights lie optimizer.safetensors (moments, and the rest of the FP32 master) and trainer.json (the loop's state and what the run was).
// A downloaded Llama or GPT-2 folder, sharded or not, has only the first two and is where fine-tuning starts.
#pragma once
#include <functional>
#include <limits>
#include <string>

#include "../coat.h"
#include "tokens.h"

namespace coat {

// Shape of the model in a Hugging Face folder; Error on what this program does not implement (rope_scaling, another
// activation, attention_bias, ...), naming the field.
ModelConfig read_model_config(const std::string& folder);

// Error unless the folder's weights are those of such a model. Before a model is made: only then config.json is known to be
// true of the files beside it.
void check_weights(const std::string& folder, const ModelConfig& config);

// Weights of a Hugging Face folder (model.safetensors, or shards by model.safetensors.index.json; BF16, F16 or F32) into
// the model. With a master the remainders are set too: zero where the file is BF16.
void load_weights(const std::string& folder, Model& model);

struct LoopState {
    int64_t step = 0;           // optimizer steps done
    int64_t updates = 0;        // of them not skipped: the step of the bias correction
    Loader::Position position;  // of the training data
    int64_t tokens = 0;
    double first_validation = 0;
    std::vector<double> norm_correction;  // of the last step that was not skipped (AdamW::norm_correction)
    std::string settings;       // JSON of the flags that shape the run, written by train.cpp, compared on resume
    std::string run = {};       // which run this is: 16 random hex digits that it keeps on resume; empty in older checkpoints
    double validation = std::numeric_limits<double>::quiet_NaN();  // loss of exactly this model; NaN if it was not validated
};

// Writes out/step-000300.tmp, syncs every file and the folder, renames it to out/step-000300, then removes the older checkpoints
// of this run, but for the newest `keep` and the one with the lowest validation loss. Nothing of another run is removed.
// A kill at any moment leaves the last good one. Returns the folder. Error if the disk is full: the partial
// folder is removed and the older checkpoints stay.
std::string save_checkpoint(const std::string& out, Model& model, const LoopState& state, int keep = 1);

// folder: a checkpoint, or a folder of them (then the newest complete one). Those that cannot be read are passed over;
// tell gets a sentence about each.
using Tell = std::function<void(const std::string&)>;
std::string find_checkpoint(const std::string& folder, const Tell& tell = {});
LoopState read_loop_state(const std::string& checkpoint);

// Everything the model needs to go on exactly. Error if a file is damaged (trainer.json has a hash of each), or the checkpoint is of another shape, version, recipe, optimizer or mode.
void load_checkpoint(const std::string& checkpoint, Model& model);

}  // namespace coat

// data/checkpoint.h - checkpoints: a training run, saved so that it resumes exactly (checkpoint.cpp).
//
// A checkpoint is a model folder (model_folder.h) that transformers opens as it is, with two more files:
// optimizer.safetensors (moments, delayed scales, and the remainders that complete the FP32 master weights)
// and trainer.json (the state of the training loop). Fine-tuning starts from a model folder without these
// two.
#pragma once
#include <functional>
#include <limits>
#include <string>

#include "model_folder.h"
#include "tokens.h"

namespace coat {

// The state of the training loop, in trainer.json.
struct LoopState {
    int64_t step = 0;             // optimizer steps done
    int64_t updates = 0;          // steps that were not skipped: the step of AdamW's bias correction
    Loader::Position position;    // in the training data
    int64_t tokens = 0;           // trained on
    double first_validation = 0;  // loss before the first step
    std::string settings;         // flags of the run as JSON; train.cpp compares them on resume
    std::string run = {};         // names the run: 16 random hex digits that stay the same on resume
    double validation = std::numeric_limits<double>::quiet_NaN();  // loss after this step; NaN: unknown
};

// Saves to the folder OUT/step-000300 and returns its path; a kill or a power failure at any moment leaves
// the last complete checkpoint. Then removes the older checkpoints of this run, except the one with the
// lowest validation loss; those of other runs stay. If the run was resumed from an earlier step, its
// checkpoints of later steps are renamed to step-000400.other. Error if the disk is full: then the older
// checkpoints stay and no partial one is left. Every rank calls it and sends what it keeps; rank 0 alone
// writes, so that files do not tell how many ranks there were.
std::string save_checkpoint(const std::string& out, Model& model, const LoopState& state,
                            const Companions& companions = {});

// The folder itself if it is a checkpoint; otherwise the checkpoint in it of the largest step. Skips those
// that cannot be read, and passes one sentence about each to `warn`. Error if there is none.
using Warn = std::function<void(const std::string&)>;
std::string find_checkpoint(const std::string& folder, const Warn& warn = {});

LoopState read_loop_state(const std::string& checkpoint);

// Error if config.json or a file of tensors is missing, damaged or cut off; the tensors themselves are not
// read. Call it before a model is made.
void check_checkpoint(const std::string& checkpoint);

// Copies weights and optimizer state into the model. Error, before the model changes, if a file is damaged
// (trainer.json has a hash of each) or if the checkpoint has another shape, recipe, optimizer or memory mode.
// Every rank reads what it keeps; rank 0 checks the values and hashes, and the others wait for it.
void load_checkpoint(const std::string& checkpoint, Model& model);

}  // namespace coat

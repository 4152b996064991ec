// data/checkpoint.h - checkpoints: a training run, saved so that it resumes exactly (checkpoint.cpp).
//
// A checkpoint is a model folder (model_folder.h), which transformers opens as it is, with two more files.
// optimizer.state has moments, delayed scales, and the remainders of the FP32 master weights. It is a
// safetensors file, but without that ending: transformers would take its tensors for weights. trainer.json
// has the state and the flags of the run, and hashes of the files.
#pragma once
#include "json.h"
#include "model_folder.h"

namespace coat {

// How far a run is.
struct LoopState {
    int64_t step = 0;             // the steps that are done; the place in the data follows from them
    int64_t updates = 0;          // steps that were not skipped: they count in AdamW's bias correction
    double first_validation = 0;  // the validation loss before the first step, in nats per token
};

// What trainer.json has.
struct SavedRun {
    LoopState state;
    // The flags of the run by their names, and the files of its data.
    ordered_json flags = ordered_json::object();
};

// Creates a folder and those above it that are missing, and syncs each folder that gets a new entry.
void create_folders(const std::string& folder);

// Saves to the folder OUT/step-000300. Then removes all but the newest `keep` checkpoints in OUT. Returns the
// path of the new checkpoint.
//   - A kill or a power failure at any moment leaves the last complete checkpoint.
//   - If the disk is full, all ranks get the Error, older checkpoints stay, and no part of the new one stays.
//   - Every rank calls this function and sends what it owns; rank 0 alone writes. The files do not depend on
//     the number of ranks.
std::string save_checkpoint(const std::string& out, Model& model, const SavedRun& run,
                            const FileContents& other_files = {}, int64_t keep = 2);

// The folder itself if it is a checkpoint; else the checkpoint of the largest step in it; empty if there is
// none. Only names are looked at.
std::string find_checkpoint(const std::string& folder);

// Error if a file of a checkpoint is missing, or is not as it was saved: all bytes are read and hashed.
void require_whole(const std::string& checkpoint);

// What --resume continues: the newest checkpoint that is whole. An interrupted copy or a bad disk may have
// left newer ones that are not.
struct WholeCheckpoint {
    struct Skipped {
        std::string path, why;  // why: a sentence
    };
    std::string path;
    std::vector<Skipped> skipped;  // newer checkpoints that are not whole, the newest first
};
WholeCheckpoint find_whole_checkpoint(const std::string& folder);  // Error if there is none

// Renames a checkpoint that is not whole, so that its name is no longer that of a checkpoint. Returns the new
// name.
std::string set_aside(const std::string& checkpoint);

SavedRun read_saved_run(const std::string& checkpoint);  // Error if a field of trainer.json was changed

// Copies weights and optimizer state of a whole checkpoint into the model. Error, before the model changes,
// if the tensors are those of another shape, recipe or optimizer.
void load_checkpoint(const std::string& checkpoint, Model& model);

}  // namespace coat

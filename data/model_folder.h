// data/model_folder.h - models as Hugging Face stores them (model_folder.cpp): config.json (the shape) and
// model.safetensors (the weights), or several model-*.safetensors. What is not implemented, or contradicts
// itself, is an Error: transformers would load another model.
#pragma once
#include <string>
#include <vector>

#include "../common/state_tensors.h"
#include "tokenizer_files.h"

namespace coat {

// The shape of the model in a folder; Error if its architecture is none of common/architecture.h.
ModelConfig read_model_config(const std::string& folder);

// Copies the folder's weights (BF16, F16 or F32) into the model, rounded to BF16. With
// RunSettings::keep_masters the remainders of the FP32 values are copied, too. Every rank reads the files and
// writes what it owns.
void load_weights(const std::string& folder, Model& model);
// Error unless load_weights() can read the files of the folder. This function is called before a model is
// made, because config.json may ask for any amount of memory.
void require_weights(const std::string& folder, const ModelConfig& config);

// Returns all bytes of a tensor on rank 0, and none on other ranks. Every rank calls this function at the
// same time.
std::vector<uint8_t> gather_whole_tensor(Model& model, const StateTensor& t);

// Writes config.json, model.safetensors (BF16) and other files into an existing folder. Every rank calls this
// function and sends what it owns; rank 0 alone writes. If writing fails, rank 0 throws an Error after all
// ranks have sent everything.
void save_model_folder(const std::string& folder, Model& model, const FileContents& other_files);

}  // namespace coat

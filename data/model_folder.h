// data/model_folder.h - models as Hugging Face stores them (model_folder.cpp).
//
// A model folder has config.json (the shape) and model.safetensors (the weights), or several weight files
// model-*.safetensors. transformers and this program read each other's folders. What this program does not
// implement, or what contradicts itself, is an Error: transformers would load another model.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "../program/model.h"
#include "safetensors.h"

namespace coat {

// The shape of the model in a folder of an architecture of model.h.
ModelConfig read_model_config(const std::string& folder);

// Copies the folder's weights (BF16, F16 or F32) into the model: rounded to BF16, and with Setup::master also
// the remainders, which are zero if the file has BF16. Every rank reads the files, and writes what it keeps
// to its model. Without a model it only checks that the files have exactly the tensors of such a model: call
// that before a model is made, because config.json may ask for any amount of memory.
void load_weights(const std::string& folder, const ModelConfig& config, Model* model);

// What a model folder has beside the weights: config.json, and the files of the tokenizer, chat templates and
// text generation, by their paths in the folder. A run reads it once, at its start, because the folder may
// have changed when a checkpoint is saved. A named model has none of it.
using Companions = std::map<std::string, std::string>;  // path -> bytes
Companions read_companions(const std::string& folder);

// The bytes of a tensor of which each rank has what it keeps: on rank 0 all of them, elsewhere none. Every
// rank calls it at the same time.
std::vector<uint8_t> whole_tensor(Model& model, const StateTensor& t);

// Writes config.json, model.safetensors (BF16) and the companions into an existing folder. Every rank calls
// it and sends what it keeps; rank 0 alone writes, and gets an Error after all have sent.
void save_model_folder(const std::string& folder, Model& model, const Companions& companions);

}  // namespace coat

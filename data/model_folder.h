// data/model_folder.h - models as Hugging Face stores them (model_folder.cpp).
//
// A model folder has config.json (the shape) and model.safetensors (the weights), or several weight files
// that model.safetensors.index.json lists. transformers and this program read each other's folders.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "../model.h"
#include "json.h"

namespace coat {

inline const std::string CONFIG_FILE = "config.json", WEIGHTS_FILE = "model.safetensors";

// The shape of the model in a folder of an architecture of model.h. Error that names the field if this
// program does not implement what config.json asks for (another type of RoPE scaling or activation function,
// ...).
ModelConfig read_model_config(const std::string& folder);

// Error unless the folder's weights are exactly the tensors of such a model. Call it before a model is
// created: config.json may be wrong about the weights, and ask for any amount of memory.
void check_weights(const std::string& folder, const ModelConfig& config);

// Copies the folder's weights (BF16, F16 or F32) into the model: rounded to BF16, and with Setup::master also
// the remainders, which are zero if the file has BF16. Error, before the model changes, if a tensor is
// missing or unknown. Every rank reads the files, and writes what it keeps to its model.
void load_weights(const std::string& folder, Model& model);

// What a model folder has beside the shape and the weights. A run reads it once, at its start, because the
// folder may have changed when a checkpoint is saved. A named model has none of it.
struct Companions {
    std::map<std::string, std::string> files;  // of the tokenizer and of text generation: name -> bytes
    nlohmann::json config;                     // the folder's config.json; null if there is no folder
};

// Error if one of these files cannot be read, or if they have more than 256 MiB together.
Companions read_companions(const std::string& folder);

// Writes config.json, model.safetensors (BF16) and the companions into an existing folder. Of the companions'
// config.json, it keeps the special tokens and the fields that this program does not write. Rank 0 calls it,
// and the others meanwhile call whole_tensor() of weight_tensors(), in their order.
void save_model_folder(const std::string& folder, Model& model, const Companions& companions = {});

// The bytes of a tensor of which each rank has what it keeps: on rank 0 all of them, elsewhere none. Every
// rank calls it at the same time.
std::vector<uint8_t> whole_tensor(Model& model, const StateTensor& t);

// Error that names the first field in which the folder's config.json differs from `config`.
void require_same_config(const std::string& folder, const ModelConfig& config);

}  // namespace coat

// data/tokenizer_files.h - the files of a model folder besides its weights: those of its tokenizer, and
// others (tokenizer_files.cpp). This program copies and compares them. It does not run tokenizers.
#pragma once
#include <map>
#include <string>

namespace coat {

// The files of a model folder besides its weights: config.json, the tokenizer, chat templates, and
// generation_config.json. A run reads them once, at its start: the folder may have changed when a checkpoint
// is saved.
using FileContents = std::map<std::string, std::string>;  // path in the folder -> bytes
FileContents read_other_files(const std::string& folder);

// Adds the tokenizer of another folder, such as that of the token files, unless `files` already have one.
void add_tokenizer(const std::string& folder, FileContents& files);

// Whether a file of this name belongs to a tokenizer, as transformers or Mistral store them: tokenizer.json,
// tokenizer.model, vocab.json and merges.txt, tekken.json, ...
bool is_tokenizer_file(const std::string& name);

// The name of a file of the tokenizer that is in this folder; empty if there is none.
std::string tokenizer_in(const std::string& folder);
// Whether a token has another text in the tokenizer of folder b than in that of folder a. This is known only
// if both have tokenizer.bin, or both have tokenizer.json with a list of tokens. False if it is not known.
bool tokenizers_differ(const std::string& a, const std::string& b);

}  // namespace coat

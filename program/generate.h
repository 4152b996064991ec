// generate.h - a model continues a text, token by token (generate.cpp): the samples of a run, and --prompt.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "../data/tokens.h"
#include "../model.h"
#include "ranks.h"

namespace coat {

struct Drawing {
    double temperature = 0.8;  // of the probabilities; 0: the most probable token
    int64_t most = 256;        // new tokens
    int32_t end_token = -1;    // after this token no other follows; -1: there is none
    uint64_t seed = 1;
};

// Appends new tokens to `tokens`, which has at least one. The model sees the last --seq tokens; each new one
// costs a whole forward pass, because nothing is saved between them. Every rank calls it at the same time and
// gets the same tokens. `seen` is called with all tokens after each that is new.
void continue_tokens(
    Model& model, ProcessGroup& processes, const Drawing& drawing, std::vector<int32_t>& tokens,
    const std::function<void()>& seen = [] {});

// The beginning of a sample of held-out text, in windows of T tokens. Of text these are its first tokens. Of
// conversations they are those before the first token that counts: a question, without its answer. Empty if
// the window has no room for more.
std::vector<int32_t> sample_prompt(const TokenStream& held_out, int64_t T);

// What turns text into the tokens of a model: the model's folder says it. Python: a tokenizer as Hugging Face
// stores it, which this program cannot run.
enum class Tokenizer : uint8_t { Bytes, Pieces, Python, Unknown };
Tokenizer tokenizer_of(const std::string& folder, const ModelConfig& config);

// The command that continues a text with the newest checkpoint in a run's folder; empty if there is none.
std::string command_to_try(const std::string& out, const std::string& checkpoint, const ModelConfig& config);

// ./train --prompt: prints the text and how the model in the folder continues it. `setup` has the recipe and
// the ranks; the rest is chosen here. The model sees at most `longest` tokens. `make`: make_gpu or
// make_reference.
void print_continuation(const std::string& folder, const std::string& text, Setup setup, int64_t longest,
                        ProcessGroup& processes, Drawing drawing,
                        const std::function<std::unique_ptr<Model>(const Setup&)>& make);

}  // namespace coat

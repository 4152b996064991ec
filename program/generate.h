// program/generate.h - a model continues a text, token by token (generate.cpp): the samples of a run, and
// --prompt.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "../data/tokens.h"
#include "../common/model.h"
#include "flags.h"
#include "processes.h"

namespace coat {

// How tokens are drawn.
struct SamplingOptions {
    double temperature = 0.8;  // logits are divided by it; 0 takes the most probable token
    int64_t most = 256;        // the largest number of new tokens
    int32_t end_token = -1;    // after this token no other follows; -1 if there is none
    uint64_t seed = 1;
};

// Appends new tokens to `tokens`, which has at least one. The model sees the last --seq tokens. Each new
// token costs a whole forward pass, because nothing is saved between passes. Every rank calls this function
// at the same time and gets the same tokens. `on_token` is called after each token that was appended.
void generate_tokens(
    Model& model, ProcessGroup& processes, const SamplingOptions& drawing, std::vector<int32_t>& tokens,
    const std::function<void()>& on_token = [] {});

// The tokens that a sample continues, from validation data in windows of T tokens:
//   of text            the first tokens
//   of conversations   the tokens before the first token that counts in the loss: a question without its
//                      answer. There are none if no window has room for an answer
std::vector<int32_t> sample_prompt(const TokenStream& validation, int64_t T);

// --prompt: prints the text and how the model in a folder continues it. Error if the tokens of the model are
// not bytes.
void answer_prompt(const Flags& flags, ProcessGroup& processes);
// The command that continues a text with this checkpoint of a run; empty if there is none.
std::string command_to_try(const std::string& checkpoint, const ModelConfig& config);

}  // namespace coat

// architecture.cpp - the table of models in common/known_models.h, beside what was published of each model.
#include <doctest/doctest.h>

#include <map>

#include "../common/known_models.h"

using namespace coat;

TEST_CASE("models: each row has the published number of parameters") {
    const std::map<std::string, int64_t> published = {
        {"gpt2", 124'439'808},           {"gpt2-medium", 354'823'168},      {"gpt2-large", 774'030'080},
        {"gpt2-xl", 1'557'611'200},      {"tinyllama-1.1b", 1'100'048'384}, {"llama-2-7b", 6'738'415'616},
        {"llama-2-13b", 13'015'864'320}, {"llama-3-8b", 8'030'261'248},     {"llama-30b", 32'528'943'616},
        {"llama-3.2-1b", 1'235'814'400}, {"llama-3.2-3b", 3'212'749'824},   {"llama-3.1-8b", 8'030'261'248},
        {"mistral-7b", 7'248'023'552},   {"qwen2.5-0.5b", 494'032'768},     {"qwen2.5-7b", 7'615'616'512},
        {"qwen3-0.6b", 596'049'920},     {"qwen3-1.7b", 1'720'574'976},     {"qwen3-8b", 8'190'735'360},
    };
    size_t ours = 0;  // models that were never published
    for (const ModelConfig& c : known_models()) {
        CAPTURE(c.name);
        if (is_one_of("llama-tiny gpt2-tiny llama-30m", c.name)) ours++;
        else CHECK(parameter_count(c) == published.at(c.name));
    }
    CHECK(known_models().size() == published.size() + ours);
}

TEST_CASE("parameters: first weights of matrices before a residual addition are smaller, as GPT-2's are") {
    for (const ModelConfig& c : known_models())
        for (const Param& p : parameters(c)) {
            CAPTURE(p.name);
            const bool adds = p.name.ends_with(".down") || p.name.ends_with(".attention_out");
            if (p.rows > 1) CHECK(p.init_std == (adds ? 0.02f / std::sqrt(2.0f * float(c.L)) : 0.02f));
        }
}

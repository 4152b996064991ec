// bad_files.h - a saved checkpoint and vocabulary to damage, for the tests of bad files.
#pragma once
#include <chrono>
#include <nlohmann/json.hpp>

#include "../data/checkpoint.h"
#include "../data/safetensors.h"
#include "../data/tokens.h"
#include "files.h"
#include "tiny.h"

namespace coat::test::bad_files {

inline double seconds_of(const std::function<void()>& action) {
    const auto begin = std::chrono::steady_clock::now();
    action();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

inline Setup small_setup() { return tiny_setup(tiny_config(LLAMA, true), "coat", "coat", 1, 16); }

// Saves a checkpoint of a model that was not trained; returns its folder.
inline std::string saved_checkpoint(const std::string& out, const std::string& settings = "{}") {
    const std::unique_ptr<Model> model = make_reference(small_setup());
    LoopState state{4, 3, {1, 7}, 1000, 5.5, {}, settings};
    return save_checkpoint(out, *model, state);
}

inline std::string vocabulary(const nlohmann::json& pieces) {
    return nlohmann::json{
        {"format", "coat vocabulary"}, {"version", 1}, {"size", pieces.size()}, {"pieces", pieces}}
        .dump();
}

// A safetensors file that has only this header.
inline std::string only_header(const std::string& header) {
    const uint64_t length = header.size();
    return std::string(reinterpret_cast<const char*>(&length), sizeof length) + header;
}

}  // namespace coat::test::bad_files

// hugging_face_folders.h - writes model folders in the layout of Hugging Face, and checks what load_weights
// read from them.
//
// Every value in a file encodes its place: number of the tensor, row and column.
#pragma once
#include <nlohmann/json.hpp>

#include "model_files.h"

namespace coat::test::hugging_face_folders {

using namespace coat::test::model_files;
using Json = nlohmann::ordered_json;
// (row, col) of the model -> tensor, row and col in the file
using Place = std::function<std::tuple<std::string, int64_t, int64_t>(int64_t row, int64_t col)>;

// A model folder before it is written: its tensors and its config.json.
struct HuggingFaceFolder {
    struct Entry {
        std::string name;
        std::vector<int64_t> shape;
        std::string dtype = "F32";
    };
    std::vector<Entry> entries;
    Json config;

    // The mantissa has 7 bits of tensor number, 6 of row and 7 of column. These are more bits than BF16 has,
    // so a master needs its remainder.
    static float value(size_t tensor, int64_t row, int64_t col) {
        return 1.0f + (static_cast<float>(tensor) * 8192.0f + static_cast<float>(row) * 128.0f +
                       static_cast<float>(col)) *
                          0x1p-20f;
    }
    size_t index(const std::string& name) const {
        return static_cast<size_t>(
            std::find_if(entries.begin(), entries.end(), [&](const Entry& e) { return e.name == name; }) -
            entries.begin());
    }
    std::string bytes(size_t i) const {
        const Entry& e = entries[i];
        const int64_t rows = e.shape.size() == 2 ? e.shape[0] : 1, cols = e.shape.back();
        std::string out;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < cols; c++) {
                const float x = value(i, r, c);
                uint32_t bits;
                std::memcpy(&bits, &x, 4);
                // Between 1 and 2 an F16 has the exponent 15 and the top 10 bits of the mantissa.
                const uint16_t half = static_cast<uint16_t>(15u << 10 | (bits >> 13 & 0x3FF)),
                               bf16 = static_cast<uint16_t>(bits >> 16);
                if (e.dtype == "F32") out.append(reinterpret_cast<const char*>(&bits), 4);
                else out.append(reinterpret_cast<const char*>(e.dtype == "F16" ? &half : &bf16), 2);
            }
        return out;
    }
    void write_weights(const std::string& path, const std::vector<size_t>& which) const {
        std::vector<TensorInfo> tensors;
        for (size_t i : which) tensors.push_back({entries[i].name, entries[i].dtype, entries[i].shape});
        SafetensorsWriter file(path, tensors);
        for (size_t i : which) {
            const std::string b = bytes(i);
            file.write(b.data(), static_cast<int64_t>(b.size()));
        }
        file.finish();
    }
    void write(const std::string& folder, int shards = 1) const {
        fs::create_directories(folder);
        write_file(folder + "/config.json", config.dump());
        std::vector<std::vector<size_t>> parts(static_cast<size_t>(shards));
        for (size_t i = 0; i < entries.size(); i++) parts[i % parts.size()].push_back(i);
        if (shards == 1) return write_weights(folder + "/model.safetensors", parts[0]);
        Json map;
        for (size_t s = 0; s < parts.size(); s++) {
            const std::string name = "model-0000" + std::to_string(s + 1) + ".safetensors";
            write_weights(folder + "/" + name, parts[s]);
            for (size_t i : parts[s]) map[entries[i].name] = name;
        }
        write_file(folder + "/model.safetensors.index.json", Json{{"weight_map", map}}.dump());
    }
};

inline HuggingFaceFolder hugging_face_llama() {
    HuggingFaceFolder f;
    f.entries = {{"model.embed_tokens.weight", {50, 32}}};
    const std::string l = "model.layers.0.";
    for (const auto& [name, rows, cols] : {std::tuple{"self_attn.q_proj", 32, 32},
                                           {"self_attn.k_proj", 16, 32},
                                           {"self_attn.v_proj", 16, 32},
                                           {"self_attn.o_proj", 32, 32},
                                           {"mlp.gate_proj", 48, 32},
                                           {"mlp.up_proj", 48, 32},
                                           {"mlp.down_proj", 32, 48}})
        f.entries.push_back({l + name + ".weight", {rows, cols}});
    for (const char* name : {"model.layers.0.input_layernorm.weight",
                             "model.layers.0.post_attention_layernorm.weight", "model.norm.weight"})
        f.entries.push_back({name, {32}});
    f.entries.push_back({"lm_head.weight", {50, 32}});
    f.config = {{"model_type", "llama"},    {"hidden_size", 32},
                {"num_hidden_layers", 1},   {"num_attention_heads", 4},
                {"num_key_value_heads", 2}, {"intermediate_size", 48},
                {"vocab_size", 50},         {"max_position_embeddings", 16},
                {"hidden_act", "silu"},     {"rms_norm_eps", 1e-6},
                {"rope_theta", 12345.0},    {"tie_word_embeddings", false}};
    return f;
}

inline HuggingFaceFolder hugging_face_mistral() {
    HuggingFaceFolder f = hugging_face_llama();
    f.config.update({{"model_type", "mistral"}, {"sliding_window", nullptr}});
    return f;
}

inline HuggingFaceFolder hugging_face_qwen2() {
    HuggingFaceFolder f = hugging_face_llama();
    f.config["model_type"] = "qwen2";
    for (const auto& [name, rows] : {std::pair{"q_proj", 32}, {"k_proj", 16}, {"v_proj", 16}})
        f.entries.push_back({std::string("model.layers.0.self_attn.") + name + ".bias", {rows}});
    return f;
}

inline HuggingFaceFolder hugging_face_gpt2(const std::string& prefix) {
    HuggingFaceFolder f;
    f.entries = {{prefix + "wte.weight", {50, 32}}, {prefix + "wpe.weight", {16, 32}}};
    const std::string h = prefix + "h.0.";
    for (const auto& [name, in, out] : {std::tuple{"attn.c_attn", 32, 96},
                                        {"attn.c_proj", 32, 32},
                                        {"mlp.c_fc", 32, 128},
                                        {"mlp.c_proj", 128, 32}}) {
        f.entries.push_back({h + name + ".weight", {in, out}});
        f.entries.push_back({h + name + ".bias", {out}});
    }
    for (const std::string& name : {h + "ln_1", h + "ln_2", prefix + "ln_f"})
        for (const char* end : {".weight", ".bias"}) f.entries.push_back({name + end, {32}});
    f.config = {
        {"model_type", "gpt2"}, {"n_embd", 32},     {"n_layer", 1},      {"n_head", 4},
        {"n_inner", nullptr},   {"vocab_size", 50}, {"n_positions", 16}, {"activation_function", "gelu_new"},
        {"resid_pdrop", 0.1}};
    return f;
}

inline MemoryModel model_of(const std::string& folder) {
    Setup setup = small_setup(LLAMA);
    setup.config = read_model_config(folder);
    return MemoryModel(setup, 9);
}

inline void check_param(const MemoryModel& model, const HuggingFaceFolder& f, const std::string& name,
                        const Place& place) {
    const std::vector<Param> table = parameters(model.setup().config);
    const Param& p = param(table, name);
    const int64_t used = used_elements(model.setup().config, p) / p.cols;
    int64_t wrong = 0;
    for (int64_t r = 0; r < p.rows; r++)
        for (int64_t c = 0; c < p.cols; c++) {
            float expected = 0;
            if (r < used) {
                const auto [tensor, row, col] = place(r, c);
                REQUIRE(f.index(tensor) < f.entries.size());
                expected = HuggingFaceFolder::value(f.index(tensor), row, col);
            }
            wrong += model.master(p, r, c) != expected;
        }
    CAPTURE(name);
    CHECK(wrong == 0);
}

inline Place same(const std::string& tensor) {
    return [=](int64_t r, int64_t c) { return std::tuple{tensor, r, c}; };
}
inline Place transposed(const std::string& tensor) {
    return [=](int64_t r, int64_t c) { return std::tuple{tensor, c, r}; };
}

inline void check_llama(const MemoryModel& model, const HuggingFaceFolder& f) {
    const std::string l = "model.layers.0.";
    check_param(model, f, "embedding", same("model.embed_tokens.weight"));
    check_param(model, f, "head", same("lm_head.weight"));
    check_param(model, f, "final_norm.weight", same("model.norm.weight"));
    check_param(model, f, "layers.0.norm1.weight", same(l + "input_layernorm.weight"));
    check_param(model, f, "layers.0.norm2.weight", same(l + "post_attention_layernorm.weight"));
    check_param(model, f, "layers.0.attention_out", same(l + "self_attn.o_proj.weight"));
    check_param(model, f, "layers.0.down", same(l + "mlp.down_proj.weight"));
    check_param(model, f, "layers.0.qkv", [&](int64_t r, int64_t c) {
        return r < 32   ? std::tuple{l + "self_attn.q_proj.weight", r, c}
               : r < 48 ? std::tuple{l + "self_attn.k_proj.weight", r - 32, c}
                        : std::tuple{l + "self_attn.v_proj.weight", r - 48, c};
    });
    if (model.setup().config.arch.qkv_bias)
        check_param(model, f, "layers.0.qkv.bias", [&](int64_t r, int64_t c) {
            return c < 32   ? std::tuple{l + "self_attn.q_proj.bias", r, c}
                   : c < 48 ? std::tuple{l + "self_attn.k_proj.bias", r, c - 32}
                            : std::tuple{l + "self_attn.v_proj.bias", r, c - 48};
        });
    check_param(model, f, "layers.0.gate_up", [&](int64_t r, int64_t c) {
        return r < 48 ? std::tuple{l + "mlp.gate_proj.weight", r, c}
                      : std::tuple{l + "mlp.up_proj.weight", r - 48, c};
    });
}

}  // namespace coat::test::hugging_face_folders

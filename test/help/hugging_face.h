// hugging_face.h - model folders in the layout of Hugging Face, as other programs write them.
//
// One table says which tensors of a file are which rows of which parameter: the folders are written from it,
// and what load_weights read is compared with it. Every value encodes its place: number of the tensor, row
// and column.
#pragma once
#include "checkpoints.h"
#include "oracle.h"

namespace coat::test {

struct HuggingFace {
    struct Piece {
        std::string ours, theirs;
        int64_t rows, cols;  // of the parameter; a vector has one column
        bool transposed = false;
        std::string dtype = "F32";
        std::vector<int64_t> shape = {};  // in the file, if it is not what the above says
    };
    std::vector<Piece> pieces;  // those of one parameter follow each other as its rows do
    Json config;

    // The mantissa has 7 bits of tensor number, 6 of row and 7 of column: more than BF16 has, so that a
    // master needs its remainder.
    static float value(size_t tensor, int64_t row, int64_t col) {
        return 1.0f + float(int64_t(tensor) * 8192 + row * 128 + col) * 0x1p-20f;
    }
    Piece& at(const std::string& end) {
        for (Piece& p : pieces)
            if (ends_with(p.theirs, end)) return p;
        throw std::logic_error(end);
    }
    void erase(const std::string& end) { pieces.erase(pieces.begin() + (&at(end) - pieces.data())); }
    void write(const std::string& folder, size_t shards = 1) const {
        fs::create_directories(folder);
        write_file(folder + "/config.json", config.dump());
        for (size_t s = 0; s < shards; s++) {
            std::vector<Tensor> tensors;
            std::string data;
            for (size_t i = s; i < pieces.size(); i += shards) {
                const Piece& p = pieces[i];
                std::vector<int64_t> shape = {p.rows, p.cols};
                if (p.transposed) std::swap(shape[0], shape[1]);
                if (p.cols == 1) shape.pop_back();
                if (!p.shape.empty()) shape = p.shape;
                tensors.push_back({p.theirs, p.dtype, shape});
                const int64_t cols = shape.size() == 2 ? shape[1] : 1;
                for (int64_t e = 0; e < shape[0] * cols; e++) {
                    // The bits of a number between 1 and 2.
                    const uint32_t bits = bits_of(p.transposed ? value(i, e % cols, e / cols)
                                                               : value(i, e / cols, e % cols)),
                                   code = p.dtype == "F32"   ? bits
                                          : p.dtype == "F16" ? 15u << 10 | (bits >> 13 & 0x3FF)
                                                             : bits >> 16;
                    data.append(reinterpret_cast<const char*>(&code), p.dtype == "F32" ? 4 : 2);
                }
            }
            const std::string name = shards == 1 ? "model.safetensors" : concat("model-", s, ".safetensors");
            write_file(folder + "/" + name, safetensors_header(tensors) + data);
        }
    }
    // All parameters of the model are those of the table, with zeros in rows that pad the vocabulary. `bits`
    // of their values are in the file.
    void check(const MemoryModel& model, uint32_t bits = ~0u) const {
        for (const Param& p : parameters(model.setup().config)) {
            INFO(p.name);
            int64_t next = 0, wrong = 0;  // next: the element
            for (size_t i = 0; i < pieces.size(); i++)
                for (int64_t e = 0; pieces[i].ours == p.name && e < pieces[i].rows * pieces[i].cols; e++) {
                    const float exact = value(i, e / pieces[i].cols, e % pieces[i].cols);
                    wrong += (bits_of(exact) & bits) != bits_of(model.master(p, next++));
                }
            const int64_t used = used_elements(model.setup().config, p);
            CHECK((wrong == 0 && next == used));
            for (; next < p.size(); next++) wrong += model.master(p, next) != 0;
            CHECK(wrong == 0);
        }
    }
};

inline HuggingFace hugging_face_llama(const std::string& type = "llama") {
    const std::string l = "layers.0.", m = "model.layers.0.", a = m + "self_attn.";
    HuggingFace f{{{"embedding", "model.embed_tokens.weight", 50, 32},
                   {l + "qkv", a + "q_proj.weight", 32, 32},
                   {l + "qkv", a + "k_proj.weight", 16, 32},
                   {l + "qkv", a + "v_proj.weight", 16, 32},
                   {l + "attention_out", a + "o_proj.weight", 32, 32},
                   {l + "gate_up", m + "mlp.gate_proj.weight", 48, 32},
                   {l + "gate_up", m + "mlp.up_proj.weight", 48, 32},
                   {l + "down", m + "mlp.down_proj.weight", 32, 48},
                   {l + "norm1.weight", m + "input_layernorm.weight", 32, 1},
                   {l + "norm2.weight", m + "post_attention_layernorm.weight", 32, 1},
                   {"final_norm.weight", "model.norm.weight", 32, 1},
                   {"head", "lm_head.weight", 50, 32}},
                  Json::parse(R"({"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 50, "max_position_embeddings": 16,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 12345.0, "tie_word_embeddings": false})")};
    f.config["model_type"] = type;
    if (type == "mistral") f.config["sliding_window"] = nullptr;
    for (const char* name : {"q_norm.weight", "k_norm.weight"})
        if (type == "qwen3") f.pieces.push_back({l + "qk_norm.weight", a + name, 8, 1});
    for (const auto& [name, rows] : {std::pair{"q_proj.bias", 32}, {"k_proj.bias", 16}, {"v_proj.bias", 16}})
        if (type == "qwen2") f.pieces.push_back({l + "qkv.bias", a + name, rows, 1});
    return f;
}

inline HuggingFace hugging_face_gpt2(const std::string& prefix = "transformer.") {
    HuggingFace f{
        {{"embedding", prefix + "wte.weight", 50, 32}, {"positions", prefix + "wpe.weight", 16, 32}},
        Json::parse(R"({"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 4, "n_inner": null,
        "vocab_size": 50, "n_positions": 16, "activation_function": "gelu_new", "resid_pdrop": 0.1})")};
    const std::string l = "layers.0.", h = prefix + "h.0.";
    for (const auto& [ours, theirs, in, out] : {std::tuple{l + "qkv", h + "attn.c_attn", 32, 96},
                                                {l + "attention_out", h + "attn.c_proj", 32, 32},
                                                {l + "gate_up", h + "mlp.c_fc", 32, 128},
                                                {l + "down", h + "mlp.c_proj", 128, 32}}) {
        f.pieces.push_back({ours, theirs + ".weight", out, in, true});
        f.pieces.push_back({ours + ".bias", theirs + ".bias", out, 1});
    }
    for (const auto& [ours, theirs] :
         {std::pair{l + "norm1", h + "ln_1"}, {l + "norm2", h + "ln_2"}, {"final_norm", prefix + "ln_f"}})
        for (const char* end : {".weight", ".bias"}) f.pieces.push_back({ours + end, theirs + end, 32, 1});
    return f;
}

inline MemoryModel model_of(const std::string& folder, bool master = true) {
    Setup setup = small_setup(LLAMA);
    setup.config = read_model_config(folder), setup.master = master;
    return MemoryModel(setup, 9);
}

}  // namespace coat::test

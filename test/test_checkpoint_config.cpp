// test_checkpoint_config.cpp - data/model_folder.cpp: config.json of model folders that other programs wrote.
#include <doctest/doctest.h>

#include "hugging_face_folders.h"

using namespace coat;
using namespace coat::test;
using namespace coat::test::hugging_face_folders;
using namespace coat::test::model_files;

TEST_CASE("read_model_config: fields with a default may be missing; rope_theta may be in rope_parameters") {
    Folder folder;
    HuggingFaceFolder f = hugging_face_llama();
    for (const char* field : {"num_key_value_heads", "rms_norm_eps", "rope_theta", "hidden_act",
                              "tie_word_embeddings", "max_position_embeddings"})
        f.config.erase(field);
    write_file(folder / "config.json", f.config.dump());
    ModelConfig c = read_model_config(folder.path.string());
    CHECK(c.NKV == 4);
    CHECK(c.norm_eps == 1e-6f);
    CHECK(c.rope_theta == 10000.0f);
    CHECK(!c.tied);
    CHECK(c.max_T == 2048);
    f.config["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 500000.0}};
    f.config["rope_scaling"] = nullptr;
    f.config["head_dim"] = 16;
    write_file(folder / "config.json", f.config.dump());
    c = read_model_config(folder.path.string());
    CHECK(c.rope_theta == 500000.0f);
    CHECK(c.HS() == 16);
}

TEST_CASE("read_model_config: an unsupported config.json is rejected by the name of its field") {
    struct Case {
        const char* field;
        Json value;
    };
    const std::vector<Case> llama = {
        {"model_type", "mistral"},      {"model_type", 3},        {"hidden_act", "gelu"},
        {"attention_bias", true},       {"mlp_bias", true},       {"quantization_config", {{"bits", 4}}},
        {"partial_rotary_factor", 0.5}, {"hidden_size", -32},     {"hidden_size", "32"},
        {"hidden_size", 1.5},           {"hidden_size", nullptr}, {"vocab_size", 1e30},
        {"rms_norm_eps", "small"},      {"rms_norm_eps", -1},     {"rope_theta", 0},
        {"tie_word_embeddings", "yes"}, {"rope_parameters", 5}};
    const std::vector<Case> gpt2 = {{"activation_function", "gelu"},
                                    {"activation_function", "relu"},
                                    {"scale_attn_weights", false},
                                    {"scale_attn_by_inverse_layer_idx", true},
                                    {"add_cross_attention", true},
                                    {"n_embd", 1 << 25},
                                    {"n_layer", nullptr}};
    Folder folder;
    const std::string path = folder / "config.json";
    auto check = [&](const HuggingFaceFolder& good, const Case& c) {
        Json config = good.config;
        config[c.field] = c.value;
        CAPTURE(config[c.field].dump());
        write_file(path, config.dump());
        check_error([&] { read_model_config(folder.path.string()); }, path, c.field);
    };
    for (const Case& c : llama) check(hugging_face_llama(), c);
    for (const Case& c : gpt2) check(hugging_face_gpt2(""), c);

    HuggingFaceFolder f = hugging_face_llama();
    f.config["rope_scaling"] = {{"rope_type", "llama3"}, {"factor", 8.0}};
    write_file(path, f.config.dump());
    check_error([&] { read_model_config(folder.path.string()); }, path, "rope_type");
    f.config["rope_scaling"] = nullptr;
    f.config["num_key_value_heads"] = 3;
    write_file(path, f.config.dump());
    check_error([&] { read_model_config(folder.path.string()); }, folder.path.string(), "heads");
    for (const char* text : {"", "[]", "{", "\xFF"}) {
        write_file(path, text);
        check_error([&] { read_model_config(folder.path.string()); }, path);
    }
    fs::remove(path);
    check_error([&] { read_model_config(folder.path.string()); }, path);
    check_error([&] { read_model_config(folder / "none"); }, folder / "none");
}

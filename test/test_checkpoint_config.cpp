// test_checkpoint_config.cpp - data/model_folder.cpp: config.json of our checkpoints, and of model folders
// that other programs wrote.
#include <doctest/doctest.h>

#include "hugging_face_folders.h"

using namespace coat;
using namespace coat::test;
using namespace coat::test::hugging_face_folders;
using namespace coat::test::model_files;

TEST_CASE("checkpoint: config.json describes the model for transformers") {
    Folder folder;
    MemoryModel llama(small_setup(LLAMA, false), 1), gpt2(small_setup(GPT2), 2);
    const Json l =
        Json::parse(read_file(save_checkpoint(folder / "l", llama, some_state(1)) + "/config.json"));
    const Json g =
        Json::parse(read_file(save_checkpoint(folder / "g", gpt2, some_state(1)) + "/config.json"));
    // The documented fields of LlamaConfig and GPT2Config.
    const Json expected_llama = {{"architectures", {"LlamaForCausalLM"}},
                                 {"model_type", "llama"},
                                 {"hidden_size", 32},
                                 {"intermediate_size", 48},
                                 {"num_hidden_layers", 2},
                                 {"num_attention_heads", 4},
                                 {"num_key_value_heads", 2},
                                 {"head_dim", 8},
                                 {"vocab_size", 50},
                                 {"max_position_embeddings", 16},
                                 {"hidden_act", "silu"},
                                 {"rms_norm_eps", 1e-6},
                                 {"rope_theta", 500000.0},
                                 {"attention_bias", false},
                                 {"mlp_bias", false},
                                 {"tie_word_embeddings", false},
                                 {"torch_dtype", "bfloat16"}};
    const Json expected_gpt2 = {{"architectures", {"GPT2LMHeadModel"}},
                                {"model_type", "gpt2"},
                                {"n_embd", 32},
                                {"n_inner", 48},
                                {"n_layer", 2},
                                {"n_head", 4},
                                {"n_positions", 16},
                                {"vocab_size", 50},
                                {"activation_function", "gelu_new"},
                                {"layer_norm_epsilon", 1e-6},
                                {"tie_word_embeddings", true},
                                {"torch_dtype", "bfloat16"}};
    // The named models have no folder, so that every field is this program's.
    auto named = [&](const char* name) {
        Setup setup = small_setup(LLAMA);
        setup.config = find_row(models(), name, "");
        setup.config.L = 1, setup.config.C = 64, setup.config.F = 16, setup.config.V = 50;  // small
        MemoryModel model(setup, 3);
        return Json::parse(read_file(save_checkpoint(folder / name, model, some_state(1)) + "/config.json"));
    };
    const Json llama3 = {{"architectures", {"LlamaForCausalLM"}},
                         {"rope_theta", 500000.0},
                         {"rope_scaling",
                          {{"rope_type", "llama3"},
                           {"factor", 32.0},
                           {"low_freq_factor", 1.0},
                           {"high_freq_factor", 4.0},
                           {"original_max_position_embeddings", 8192}}},
                         {"max_position_embeddings", 131072},
                         {"tie_word_embeddings", true}},
               mistral = {{"architectures", {"MistralForCausalLM"}},
                          {"model_type", "mistral"},
                          {"rope_theta", 1000000.0},
                          {"rope_scaling", nullptr},
                          {"sliding_window", nullptr}},
               qwen2 = {{"architectures", {"Qwen2ForCausalLM"}},
                        {"model_type", "qwen2"},
                        {"rms_norm_eps", 1e-6},
                        {"use_sliding_window", false},
                        {"tie_word_embeddings", true}};
    CHECK(named("mistral-7b").contains("sliding_window"));  // where it is missing, transformers assumes 4096
    for (const auto& [found, expected] : {std::pair{l, expected_llama},
                                          {g, expected_gpt2},
                                          {named("llama-3.2-1b"), llama3},
                                          {named("mistral-7b"), mistral},
                                          {named("qwen2.5-0.5b"), qwen2}})
        for (const auto& [field, value] : expected.items()) {
            CAPTURE(field);
            CHECK(found.value(field, Json()) == value);
        }
}

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

TEST_CASE("read_model_config: rope_scaling and rope_parameters are read in all their spellings") {
    Folder folder;
    auto read = [&](const Json& fields) {
        HuggingFaceFolder f = hugging_face_llama();
        f.config.update(fields);
        write_file(folder / "config.json", f.config.dump());
        return read_model_config(folder.path.string());
    };
    const Json llama3 = {{"rope_type", "llama3"},
                         {"factor", 32.0},
                         {"low_freq_factor", 1.5},
                         {"high_freq_factor", 4.5},
                         {"original_max_position_embeddings", 8192}};
    Json with_theta = llama3;
    with_theta["rope_theta"] = 7.0;
    // transformers prefers a rope_scaling that is not empty, and the rope_theta in it.
    for (const auto& [fields, theta] : std::vector<std::pair<Json, float>>{
             {{{"rope_scaling", llama3}}, 12345},
             {{{"rope_parameters", llama3}, {"rope_scaling", nullptr}}, 12345},
             {{{"rope_parameters", with_theta}}, 7},
             {{{"rope_parameters", with_theta}, {"rope_scaling", Json::object()}}, 7},
             {{{"rope_parameters", {{"rope_type", "linear"}}}, {"rope_scaling", llama3}}, 12345}}) {
        CAPTURE(fields.dump());
        const ModelConfig c = read(fields);
        CHECK(c.rope_theta == theta);
        CHECK(c.rope_scaling.type == RopeScaling::Llama3);
        CHECK(c.rope_scaling.factor == 32);
        CHECK(c.rope_scaling.low_freq_factor == 1.5f);
        CHECK(c.rope_scaling.high_freq_factor == 4.5f);
        CHECK(c.rope_scaling.original_positions == 8192);
    }
    for (const char* field : {"type", "rope_type"}) {
        const RopeScaling linear = read({{"rope_scaling", {{field, "linear"}, {"factor", 2}}}}).rope_scaling;
        CHECK(linear.type == RopeScaling::Linear);
        CHECK(linear.factor == 2);
        CHECK(read({{"rope_scaling", {{field, "default"}}}}).rope_scaling.type == RopeScaling::Default);
    }
}

TEST_CASE("read_model_config: sliding windows of Mistral and Qwen2, and the error where one is too short") {
    Folder folder;
    auto window = [&](HuggingFaceFolder f, const Json& fields) {
        f.config["max_position_embeddings"] = 100000;
        f.config["num_hidden_layers"] = 3;
        f.config.update(fields);
        write_file(folder / "config.json", f.config.dump());
        Setup setup = small_setup(LLAMA);
        setup.config = read_model_config(folder.path.string());
        const int64_t w = setup.config.window;
        CHECK(setup.config.longest() == (w ? w : 100000));
        setup.T = w ? w : 8192;
        CHECK_NOTHROW(validate(setup));
        setup.T++;
        const std::string cure = "use at most --seq " + std::to_string(w) + ".";
        if (w) check_error([&] { validate(setup); }, "sliding window", cure);
        return w;
    };
    HuggingFaceFolder mistral = hugging_face_mistral();
    CHECK(window(mistral, {{"sliding_window", nullptr}}) == 0);
    CHECK(window(mistral, {{"sliding_window", 2048}}) == 2048);
    mistral.config.erase("sliding_window");
    CHECK(window(mistral, Json::object()) == 4096);  // transformers' default
    const HuggingFaceFolder qwen2 = hugging_face_qwen2();
    CHECK(window(qwen2, Json::object()) == 0);
    CHECK(window(qwen2, {{"use_sliding_window", false}, {"sliding_window", 2048}}) == 0);
    const Json slides = {{"use_sliding_window", true}, {"sliding_window", 2048}, {"max_window_layers", 2}};
    CHECK(window(qwen2, slides) == 2048);
    Json none = slides, listed = slides;
    none["max_window_layers"] = 3;  // the layers before this one have full attention
    CHECK(window(qwen2, none) == 0);
    listed["layer_types"] = {"full_attention", "full_attention", "full_attention"};
    CHECK(window(qwen2, listed) == 0);
    listed["layer_types"][2] = "sliding_attention";
    CHECK(window(qwen2, listed) == 2048);
    CHECK(window(hugging_face_llama(), {{"sliding_window", 8}}) == 0);  // not a field of Llama
}

TEST_CASE("read_model_config: an unsupported config.json is rejected by the name of its field") {
    struct Case {
        const char* field;
        Json value;
    };
    const std::vector<Case> llama = {
        {"model_type", "qwen3"},        {"model_type", 3},        {"hidden_act", "gelu"},
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
                                    {"n_embd", 1 << 15},
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
    for (const char* where : {"rope_scaling", "rope_parameters"}) {
        const Json llama3 = {{"rope_type", "llama3"},
                             {"factor", 8.0},
                             {"low_freq_factor", 1.0},
                             {"high_freq_factor", 4.0},
                             {"original_max_position_embeddings", 8192}};
        auto rejected = [&](const Json& rope, const char* field) {
            f.config[where] = rope;
            CAPTURE(rope.dump());
            write_file(path, f.config.dump());
            check_error([&] { read_model_config(folder.path.string()); }, path, field);
        };
        rejected({{"rope_type", "yarn"}, {"factor", 8.0}}, "rope_type");
        rejected({{"type", "dynamic"}, {"factor", 8.0}}, "type");
        rejected({{"type", 3}}, "type");
        rejected({{"type", "linear"}}, "factor");
        rejected({{"type", "linear"}, {"factor", -1}}, "factor");
        rejected({{"rope_type", "default"}, {"partial_rotary_factor", 0.5}}, "partial_rotary_factor");
        rejected("llama3", where);
        for (const auto& [field, value] : llama3.items()) {
            if (field == "rope_type") continue;
            Json rope = llama3;
            rope.erase(field);
            rejected(rope, field.c_str());
            rope[field] = "8";
            rejected(rope, field.c_str());
        }
        Json rope = llama3;
        rope["high_freq_factor"] = 1.0;  // the formula would divide by zero
        rejected(rope, "high_freq_factor");
        f.config[where] = nullptr;
    }
    f.config["hidden_size"] = 40;
    write_file(path, f.config.dump());
    auto read = [&] { read_model_config(folder.path.string()); };
    check_error(read, "hidden size 40", "multiples of 16, as FP8");
    f.config["hidden_size"] = 32;
    f.config["num_hidden_layers"] = 5000;
    write_file(path, f.config.dump());
    check_error(read, "layers is 5000", "from 1 to 4096");
    f.config["num_hidden_layers"] = 1;
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

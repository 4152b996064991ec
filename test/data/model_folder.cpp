// model_folder.cpp - data/model_folder.cpp: config.json and weights of Hugging Face's model folders. What we
// write for transformers, what other programs wrote for us, what transformers would load as another model,
// and what a checkpoint keeps of the folder that a run started from.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <set>

#include "../../program/plan.h"
#include "../help/hugging_face.h"
#include "../help/program.h"

using namespace coat;
using namespace coat::test;

namespace {

using Row = std::tuple<const char*, Json, const char*>;  // a field, its value, and what the error says

Json config_in(const std::string& folder) { return Json::parse(read_file(folder + "/config.json")); }

// The config.json that is saved of a model that came with these files.
Json saved_config(const Setup& setup, const Companions& companions = {}) {
    Folder folder;
    MemoryModel model(setup, 1);
    return config_in(save_checkpoint(folder / "out", model, some_state(1), companions));
}

ModelConfig read_config(const Json& config) {
    Folder folder;
    folder.write("config.json", config.dump());
    return read_model_config(folder.path.string());
}
ModelConfig read_fields(HuggingFace f, const Json& fields) {
    f.config.update(fields);
    return read_config(f.config);
}

void check_fields(const Json& found, const Json& expected) {
    for (const auto& [field, value] : expected.items()) {
        INFO(field);
        CHECK(found.value(field, Json()) == value);
    }
}

void load(const std::string& folder, MemoryModel& model) {
    load_weights(folder, model.setup().config, &model);
}

const Json LLAMA3 = {{"rope_type", "llama3"},
                     {"factor", 32.0},
                     {"low_freq_factor", 1.5},
                     {"high_freq_factor", 4.5},
                     {"original_max_position_embeddings", 8192}};

}  // namespace

TEST_CASE("save_model_folder: config.json has the documented fields of transformers") {
    auto named = [](const char* name) {  // these have no folder: every field is this program's
        Setup setup = small_setup(LLAMA);
        setup.config = find_row(models(), name, "");
        setup.config.L = 1, setup.config.C = 64, setup.config.F = 16, setup.config.V = 50;  // small
        return saved_config(setup);
    };
    check_fields(saved_config(small_setup(LLAMA, false)), {{"architectures", {"LlamaForCausalLM"}},
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
                                                           {"rms_norm_eps", 1e-6f},
                                                           {"rope_theta", 500000.0},
                                                           {"tie_word_embeddings", false},
                                                           {"torch_dtype", "bfloat16"}});
    check_fields(saved_config(small_setup(GPT2)), {{"architectures", {"GPT2LMHeadModel"}},
                                                   {"model_type", "gpt2"},
                                                   {"n_embd", 32},
                                                   {"n_inner", 48},
                                                   {"n_layer", 2},
                                                   {"n_head", 4},
                                                   {"n_positions", 16},
                                                   {"vocab_size", 50},
                                                   {"activation_function", "gelu_new"},
                                                   {"layer_norm_epsilon", 1e-6f},
                                                   {"tie_word_embeddings", true},
                                                   {"torch_dtype", "bfloat16"}});
    Json scaling = LLAMA3;
    scaling["low_freq_factor"] = 1.0, scaling["high_freq_factor"] = 4.0;
    check_fields(named("llama-3.2-1b"), {{"rope_theta", 500000.0},
                                         {"rope_scaling", scaling},
                                         {"max_position_embeddings", 131072},
                                         {"tie_word_embeddings", true}});
    check_fields(
        named("mistral-7b"),
        {{"architectures", {"MistralForCausalLM"}}, {"model_type", "mistral"}, {"rope_theta", 1000000.0}});
    CHECK(named("mistral-7b").contains("sliding_window"));  // where it is missing, transformers assumes 4096
    check_fields(
        named("qwen2.5-0.5b"),
        {{"architectures", {"Qwen2ForCausalLM"}}, {"rms_norm_eps", 1e-6f}, {"tie_word_embeddings", true}});
}

TEST_CASE("read_model_config: defaults of missing fields, and all spellings of scaled frequencies") {
    Json config = hugging_face_llama().config;
    for (const char* field : {"num_key_value_heads", "rms_norm_eps", "rope_theta", "hidden_act",
                              "tie_word_embeddings", "max_position_embeddings"})
        config.erase(field);
    ModelConfig c = read_config(config);
    CHECK((c.NKV == 4 && c.norm_eps == 1e-6f && c.rope_theta == 10000.0f && !c.tied && c.max_T == 2048));
    config.update({{"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 500000.0}}},
                   {"rope_scaling", nullptr},
                   {"head_dim", 16}});
    c = read_config(config);
    CHECK((c.rope_theta == 500000.0f && c.HS() == 16));
    Json theta = LLAMA3;
    theta["rope_theta"] = 7.0;
    // transformers prefers a rope_scaling that is not empty, and the rope_theta in it.
    for (const auto& [fields, expected] : std::vector<std::pair<Json, float>>{
             {{{"rope_scaling", LLAMA3}}, 12345},
             {{{"rope_parameters", LLAMA3}, {"rope_scaling", nullptr}}, 12345},
             {{{"rope_parameters", theta}}, 7},
             {{{"rope_parameters", theta}, {"rope_scaling", Json::object()}}, 7},
             {{{"rope_parameters", {{"rope_type", "yarn"}}}, {"rope_scaling", LLAMA3}}, 12345}}) {
        CAPTURE(fields.dump());
        const ModelConfig read = read_fields(hugging_face_llama(), fields);
        const RopeScaling& s = read.rope_scaling;
        CHECK((read.rope_theta == expected && s.type == RopeScaling::Llama3 && s.factor == 32));
        CHECK((s.low_freq_factor == 1.5f && s.high_freq_factor == 4.5f && s.original_positions == 8192));
    }
    for (const char* field : {"type", "rope_type"}) {
        auto scaling = [&](const Json& j) {
            return read_fields(hugging_face_llama(), {{"rope_scaling", j}}).rope_scaling;
        };
        CHECK(scaling({{field, "default"}}).type == RopeScaling::Default);
    }
}

TEST_CASE("read_model_config: sliding windows of Mistral and Qwen2, and the error where one is too short") {
    const Json none = Json::object(), slides = {{"use_sliding_window", true}, {"sliding_window", 2048}};
    auto with = [&](const char* field, const Json& value) {
        Json j = slides;
        j[field] = value;
        return j;
    };
    HuggingFace mistral = hugging_face_llama("mistral"), qwen2 = hugging_face_llama("qwen2"),
                unsaid = mistral;
    unsaid.config.erase("sliding_window");
    for (const auto& [f, fields, expected] : std::vector<std::tuple<HuggingFace, Json, int64_t>>{
             {mistral, none, 0},
             {mistral, {{"sliding_window", 2048}}, 2048},
             {unsaid, none, 4096},
             {qwen2, none, 0},
             {qwen2, with("use_sliding_window", false), 0},
             {hugging_face_llama(), {{"sliding_window", 8}}, 0}}) {  // not a field of Llama
        Json all = fields;
        all.update({{"max_position_embeddings", 100000}, {"num_hidden_layers", 3}});
        CAPTURE(fields.dump());
        Setup setup = small_setup(LLAMA);
        setup.config = read_fields(f, all);
        CHECK((setup.config.window == expected && setup.config.longest() == (expected ? expected : 100000)));
        setup.T = expected ? expected : 8192;
        CHECK_NOTHROW(validate(setup));
        setup.T++;
        if (expected)
            check_error([&] { validate(setup); }, "sliding window", concat("use at most --seq ", expected));
    }
}

TEST_CASE("read_model_config: an unsupported config.json is rejected by the name of its field") {
    Folder folder;
    const std::string path = folder / "config.json";
    auto rejected = [&](const HuggingFace& good, const char* field, const Json& value,
                        const std::string& says) {
        Json config = good.config;
        config[field] = value;
        INFO(field, " ", value.dump());
        write_file(path, config.dump());
        check_error([&] { read_model_config(folder.path.string()); }, folder.path.string(), says);
    };
    for (const auto& [field, value, says] : std::vector<Row>{{"model_type", "qwen3_moe", "qwen3"},
                                                             {"head_dim", 0, ""},
                                                             {"vocab_size", 0, ""},
                                                             {"model_type", 3, ""},
                                                             {"hidden_act", "gelu", ""},
                                                             {"partial_rotary_factor", 0.5, ""},
                                                             {"use_sliding_window", true, ""},
                                                             {"hidden_size", -32, ""},
                                                             {"hidden_size", "32", ""},
                                                             {"hidden_size", 1.5, ""},
                                                             {"hidden_size", nullptr, ""},
                                                             {"vocab_size", 1e30, ""},
                                                             {"rms_norm_eps", "small", ""},
                                                             {"rms_norm_eps", -1, ""},
                                                             {"rope_theta", 0, ""},
                                                             {"tie_word_embeddings", "yes", ""},
                                                             {"rope_parameters", 5, ""},
                                                             {"hidden_size", 40, "multiples of 16"},
                                                             {"num_hidden_layers", 5000, "from 1 to 4096"},
                                                             {"num_key_value_heads", 3, "heads"}})
        rejected(hugging_face_llama(), field, value, *says ? says : field);
    for (const auto& [field, value, says] : std::vector<Row>{{"activation_function", "gelu", ""},
                                                             {"activation_function", "relu", ""},
                                                             {"scale_attn_weights", false, ""},
                                                             {"scale_attn_by_inverse_layer_idx", true, ""},
                                                             {"n_embd", 1 << 15, "hidden size"},
                                                             {"n_head", 0, ""},
                                                             {"n_layer", nullptr, ""}})
        rejected(hugging_face_gpt2(), field, value, *says ? says : field);
    for (const char* where : {"rope_scaling", "rope_parameters"}) {
        for (const auto& [says, value, unused] : std::vector<Row>{
                 {"rope_type", {{"rope_type", "yarn"}, {"factor", 8.0}}, ""},
                 {"type", {{"type", 3}}, ""},
                 {"type", {{"type", "dynamic"}, {"factor", 8.0}}, ""},
                 {"type", {{"type", "linear"}, {"factor", 2}}, ""},
                 {where, "llama3", ""},
                 {"partial_rotary_factor", {{"rope_type", "default"}, {"partial_rotary_factor", 0.5}}, ""}})
            rejected(hugging_face_llama(), where, value, says);
        for (const auto& [field, value] : LLAMA3.items()) {
            Json rope = LLAMA3;
            rope.erase(field);
            if (field != "rope_type") rejected(hugging_face_llama(), where, rope, field);
            rope[field] = field == "high_freq_factor" ? Json(1.5) : Json("8");  // 1.5 would divide by zero
            rejected(hugging_face_llama(), where, rope, field);
        }
    }
    for (const char* text : {"", "[]", "{", "\xFF"}) {
        write_file(path, text);
        check_error([&] { read_model_config(folder.path.string()); }, path);
    }
    fs::remove(path);
    check_error([&] { read_model_config(folder.path.string()); }, path);
    check_error([&] { read_model_config(folder / "none"); }, folder / "none");
}

TEST_CASE("load_weights: reads a Hugging Face folder of every architecture, dtype and number of shards") {
    HuggingFace gpt2 = hugging_face_gpt2();
    gpt2.pieces.push_back({"", "transformer.h.0.attn.bias", 16, 16});  // a buffer
    gpt2.pieces.push_back({"", "transformer.h.0.attn.masked_bias", 1, 1});
    for (HuggingFace f : {hugging_face_llama(), hugging_face_llama("mistral"), hugging_face_llama("qwen2"),
                          hugging_face_llama("qwen3"), gpt2, hugging_face_gpt2("")})
        for (const auto& [dtype, bits] : {std::pair{"F32", ~0u}, {"F16", 0xFFFFE000u}, {"BF16", 0xFFFF0000u}})
            for (size_t shards : {1, 3}) {
                INFO(f.config.at("model_type").get<std::string>(), ", ", dtype, ", ", shards, " shards");
                for (HuggingFace::Piece& p : f.pieces) p.dtype = dtype;
                Folder folder;
                f.write(folder.path.string(), shards);
                MemoryModel model = model_of(folder.path.string()),
                            lean = model_of(folder.path.string(), false);
                CHECK(model.setup().config.arch.name == f.config.at("model_type").get<std::string>());
                load(folder.path.string(), model);
                f.check(model, bits);
                load(folder.path.string(), lean);  // --master none: rounded to the nearest BF16
                for (const StateTensor& t : weight_tensors(lean.setup().config))
                    CHECK((model.tensors.at(t.name) == lean.tensors.at(t.name)));
            }
}

TEST_CASE("load_weights: all finite F16 values and any F32 value give exact masters; other values an error") {
    HuggingFace f = hugging_face_llama();
    f.config["vocab_size"] = 65536 / 32;
    f.at("embed_tokens.weight").rows = f.at("lm_head.weight").rows = 2048;
    f.at("embed_tokens.weight").dtype = "F16";
    Folder folder;
    f.write(folder.path.string());
    // Overwrites both tensors: with every finite F16 code, and with FP32 bit patterns of every kind.
    const std::string path = folder / "model.safetensors";
    std::string bytes = read_file(path);
    std::map<std::string, size_t> at;
    const Safetensors file(path);
    const Tensor& head = file.tensors().at("lm_head.weight");  // the last in the file
    for (const auto& [name, t] : file.tensors())
        at[name] = bytes.size() - size_t(head.data + head.bytes - t.data);
    FRESH_RANDOM(random);
    std::vector<uint32_t> patterns(65536);
    auto finite = [](uint32_t half) { return (half >> 10 & 31) != 31; };
    for (uint32_t i = 0; i < 65536; i++) {
        patterns[i] = i % 4 ? uint32_t(random.bits()) : i << 16 | 0x8000;  // a tie between two BF16 values
        if ((patterns[i] & 0x7F800000) >= 0x7F000000) patterns[i] &= 0xBFFFFFFF;  // finite, also as BF16
        const uint16_t half = uint16_t(finite(i) ? i : 0);
        std::memcpy(&bytes[at["model.embed_tokens.weight"] + 2 * i], &half, 2);
        std::memcpy(&bytes[at["lm_head.weight"] + 4 * i], &patterns[i], 4);
    }
    write_file(path, bytes);
    MemoryModel model = model_of(folder.path.string());
    load(folder.path.string(), model);
    auto param = [params = parameters(model.setup().config)](const std::string& name) {
        return *std::find_if(params.begin(), params.end(), [&](const Param& p) { return p.name == name; });
    };
    int64_t wrong = 0;
    for (uint32_t i = 0; i < 65536; i++) {
        const int exponent = i >> 10 & 31, mantissa = i & 1023;
        const float magnitude = exponent ? std::ldexp(1024.0f + float(mantissa), exponent - 25)
                                         : std::ldexp(float(mantissa), -24);
        wrong += bits_of(model.master(param("head"), i / 32, i % 32)) != patterns[i];
        wrong += finite(i) && bits_of(model.master(param("embedding"), i / 32, i % 32)) !=
                                  bits_of(i & 0x8000 ? -magnitude : magnitude);
    }
    CHECK(wrong == 0);
    // NaN and infinities, NaNs whose upper half would round to zeros, and what would round to infinity.
    for (uint32_t code : {0x7FC00000u, 0x7F800000u, 0xFF800000u, 0x7FFFFFFFu, 0xFFFFFFFFu, 0x7F7FFFFFu}) {
        std::string bad = bytes;
        std::memcpy(&bad[at["model.norm.weight"] + 8], &code, 4);
        write_file(path, bad);
        check_error([&] { load(folder.path.string(), model); }, folder.path.string(), "model.norm.weight");
    }
}

TEST_CASE("load_weights: tensors that are missing, unknown or of another shape change nothing in the model") {
    using F = HuggingFace;
    auto erase = [](F& f, const char* end) {
        f.pieces.erase(f.pieces.begin() + (&f.at(end) - f.pieces.data()));
    };
    struct Row {
        std::string type, says;
        std::function<void(F&)> change;
    };
    for (const Row& row :
         std::vector<Row>{{"llama", "up_proj", [&](F& f) { erase(f, "up_proj.weight"); }},
                          {"llama", "lm_head.weight", [&](F& f) { erase(f, "lm_head.weight"); }},
                          {"llama", "q_proj",
                           [](F& f) {
                               f.at("q_proj.weight").shape = {16, 32};
                           }},
                          {"llama", "down_proj",
                           [](F& f) {
                               f.at("down_proj.weight").shape = {48, 32};
                           }},
                          {"llama", "model.norm",
                           [](F& f) {
                               f.at("model.norm.weight").shape = {1, 32};
                           }},
                          {"llama", "q_proj.bias",
                           [](F& f) {
                               f.pieces.push_back({"", "model.layers.0.self_attn.q_proj.bias", 32, 1});
                           }},
                          {"llama", "layers.1",
                           [](F& f) {
                               f.pieces.push_back({"", "model.layers.1.input_layernorm.weight", 32, 1});
                           }},
                          {"llama", "in BF16 F16 F32", [](F& f) { f.at("k_proj.weight").dtype = "I16"; }},
                          {"llama", "lm_head", [](F& f) { f.config["tie_word_embeddings"] = true; }},
                          {"gpt2", "lm_head",
                           [](F& f) {
                               f.pieces.push_back({"", "lm_head.weight", 50, 32});
                           }},
                          {"qwen2", "v_proj.bias", [&](F& f) { erase(f, "v_proj.bias"); }},
                          {"qwen3", "k_norm.weight", [&](F& f) { erase(f, "k_norm.weight"); }},
                          {"qwen2", "v_proj.bias", [](F& f) { f.at("v_proj.bias").shape = {32}; }}})
        for (size_t shards : {1, 2}) {
            CAPTURE(row.says);
            F f = row.type == "gpt2" ? hugging_face_gpt2() : hugging_face_llama(row.type.c_str());
            row.change(f);
            Folder folder;
            f.write(folder.path.string(), shards);
            MemoryModel model = model_of(folder.path.string());
            check_error([&] { load(folder.path.string(), model); }, folder.path.string(), row.says);
            CHECK(model.writes == 0);
        }
    Folder folder;
    hugging_face_llama().write(folder.path.string(), 2);
    MemoryModel model = model_of(folder.path.string());
    // A tensor in two files: a shard that is left over, or a copy under another name.
    fs::copy_file(folder / "model-1.safetensors", folder / "model-7.safetensors");
    check_error([&] { load(folder.path.string(), model); }, "model-", "also has");
    for (const char* name : {"model-1.safetensors", "model-7.safetensors"}) fs::remove(folder / name);
    check_error([&] { load(folder.path.string(), model); }, folder.path.string(), "has no tensor");
    CHECK(model.writes == 0);
}

TEST_CASE("save_model_folder: the folder's own config.json stays as it is, but for the dtype") {
    Folder folder;
    HuggingFace f = hugging_face_llama("mistral");
    f.config.erase("sliding_window");  // missing and null differ in transformers
    f.config.update({{"torch_dtype", "float32"},
                     {"dtype", "float32"},
                     {"pad_token_id", nullptr},
                     {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 500000.0}}},
                     {"eos_token_id", {8, 9}},
                     {"unknown", {{"deep", {1, nullptr, "text"}}}}});
    f.write(folder / "model");
    const Json saved = saved_config(model_of(folder / "model").setup(), read_companions(folder / "model"));
    Json expected = f.config;
    expected.erase("dtype");  // what transformers 5 calls torch_dtype
    expected["torch_dtype"] = "bfloat16";
    CHECK(saved == expected);
}

TEST_CASE("train: the tokenizer's files and chat templates go from the model folder to every checkpoint") {
    RunFolder folder;
    HuggingFace f = hugging_face_llama();
    f.at("embed_tokens.weight").rows = f.at("lm_head.weight").rows = 256;
    f.config.update({{"vocab_size", 256}, {"bos_token_id", 7}, {"_name_or_path", "someone/\u00e9"}});
    f.write(folder / "model");
    const std::vector<std::string> names = {"tokenizer.json",
                                            "tokenizer_config.json",
                                            "special_tokens_map.json",
                                            "added_tokens.json",
                                            "vocab.json",
                                            "merges.txt",
                                            "tokenizer.model",
                                            "chat_template.jinja",
                                            "chat_template.json",
                                            "generation_config.json",
                                            "additional_chat_templates/tool_use.jinja"};
    auto bytes_of = [](const std::string& name) { return name + std::string("\r\n\0\xFF\n\n", 6); };
    for (const std::string& name : names) folder.write("model/" + name, bytes_of(name));
    for (const char* name :
         {"README.md", "more.safetensors", "runs/step-000001/tokenizer.json", ".git/tokenizer.json"})
        folder.write(concat("model/", name), "not a companion");
    require_success(tiny(folder, "--steps 2 --warmup 0 --model model"));
    fs::rename(folder / "model", folder / "moved");  // a resumed run takes them from the checkpoint
    require_success(train(folder, "--device cpu --resume out --steps 3 --out next"));
    for (const char* checkpoint : {"out/step-000002", "next/step-000003"}) {
        CAPTURE(checkpoint);
        std::set<std::string> expected(names.begin(), names.end()), found;
        for (const auto& [name, bytes] : folder.files())
            if (name.rfind(std::string(checkpoint) + "/", 0) == 0)
                found.insert(name.substr(strlen(checkpoint) + 1));
        for (const std::string& name : names)
            CHECK((read_file(folder.path / checkpoint / name) == bytes_of(name)));
        expected.insert({"config.json", "model.safetensors", "optimizer.state", "trainer.json"});
        CHECK(found == expected);
        check_fields(config_in(folder / checkpoint), f.config);
        // Exactly the tensors of the model are in files that end in .safetensors.
        const Safetensors weights(folder / checkpoint + "/model.safetensors");
        CHECK(weights.tensors().size() == f.pieces.size());
        for (const HuggingFace::Piece& p : f.pieces) CHECK(weights.tensors().count(p.theirs) == 1);
    }
    // A named model has none of this.
    require_success(tiny(folder, "--steps 1 --warmup 0 --out named"));
    CHECK(std::distance(fs::directory_iterator(folder / "named/step-000001"), {}) == 4);
    CHECK(config_in(folder / "named/step-000001").at("bos_token_id").is_null());
    const std::string path = folder / "moved/tokenizer.json";
    fs::remove(path), fs::create_symlink("merges.txt", path);  // as in the cache of Hugging Face
    CHECK((read_companions(folder / "moved").at("tokenizer.json") == bytes_of("merges.txt")));
}

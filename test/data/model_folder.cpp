// model_folder.cpp - data/model_folder.cpp: config.json and weights of Hugging Face's folders, as we write
// and read them; what would be another model in transformers; which files a checkpoint keeps of a folder.
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstring>

#include "../../program/plan.h"
#include "../help/checkpoints.h"
#include "../help/oracle.h"
#include "../help/program.h"

using namespace coat;
using namespace coat::test;

namespace {

// One table says which tensors of a file are which rows of which parameter: the folders are written from it,
// and what load_weights read is compared with it. Every value encodes its place: tensor, row and column.
struct HuggingFace {
    struct Piece {
        std::string ours, theirs;
        int64_t rows, cols;  // of the parameter; a vector has one column
        bool transposed = false;
        std::string dtype = "F32";
        std::vector<int64_t> shape = {};   // in the file, if it is not what the above says
        std::vector<uint32_t> codes = {};  // bits in the file, if they are not those of value()
    };
    std::vector<Piece> pieces;  // those of one parameter follow each other as its rows do
    ordered_json config;

    // 7 bits of tensor number, 6 of row and 7 of column: more than BF16 has, so masters need remainders.
    static float value(size_t tensor, int64_t row, int64_t col) {
        return 1.0f + float(int64_t(tensor) * 8192 + row * 128 + col) * 0x1p-20f;
    }
    Piece& at(const std::string& end, const std::string& or_end = "none") {
        for (Piece& p : pieces)
            if (p.theirs.ends_with(end) || p.theirs.ends_with(or_end)) return p;
        throw std::logic_error(end);
    }
    // The bits in a file of a number between 1 and 2 that has these bits as a float.
    static uint32_t code(const std::string& dtype, uint32_t bits) {
        if (dtype == "F32") return bits;
        return dtype == "F16" ? 15u << 10 | (bits >> 13 & 0x3FF) : bits >> 16;
    }
    void erase(const std::string& end) { pieces.erase(pieces.begin() + (&at(end) - pieces.data())); }
    void write(const std::string& folder, size_t shards = 1) const {
        fs::create_directories(folder);
        write_file(folder + "/config.json", config.dump());
        for (size_t s = 0; s < shards; s++) {
            std::vector<HfTensor> tensors;
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
                    const uint32_t bits = bits_of(p.transposed ? value(i, e % cols, e / cols)
                                                               : value(i, e / cols, e % cols)),
                                   in_file = p.codes.empty() ? code(p.dtype, bits) : p.codes[size_t(e)];
                    data.append(reinterpret_cast<const char*>(&in_file), p.dtype == "F32" ? 4 : 2);
                }
            }
            const std::string name = shards == 1 ? "model.safetensors" : concat("model-", s, ".safetensors");
            write_file(folder + "/" + name, safetensors_header(tensors) + data);
        }
    }
    // All parameters are those of the table, or zeros in padding. The file has these `bits` of their values.
    void check(const MemoryModel& model, uint32_t bits = ~0u) const {
        for (const Param& p : parameters(model.settings().config)) {
            INFO(p.name);
            int64_t next = 0, wrong = 0;  // next: the element
            for (size_t i = 0; i < pieces.size(); i++)
                for (int64_t e = 0; pieces[i].ours == p.name && e < pieces[i].rows * pieces[i].cols; e++) {
                    const float exact = value(i, e / pieces[i].cols, e % pieces[i].cols);
                    wrong += (bits_of(exact) & bits) != bits_of(model.master(p, next++));
                }
            const int64_t used = used_elements(model.settings().config, p);
            CHECK(wrong == 0);
            CHECK(next == used);
            for (; next < p.size(); next++) wrong += model.master(p, next) != 0;
            CHECK(wrong == 0);
        }
    }
};

}  // namespace

static HuggingFace hugging_face_llama(const std::string& type = "llama") {
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
                  ordered_json::parse(R"({"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
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

static HuggingFace hugging_face_gpt2(const std::string& prefix = "transformer.") {
    HuggingFace f{
        {{"embedding", prefix + "wte.weight", 50, 32}, {"positions", prefix + "wpe.weight", 16, 32}},
        ordered_json::parse(
            R"({"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 4, "n_inner": null,
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

// The names of transformers' LlamaModel: "layers.0...", without "model." before them.
static HuggingFace without_prefix(bool tied) {
    HuggingFace f = hugging_face_llama();
    for (HuggingFace::Piece& p : f.pieces)
        if (p.theirs.starts_with("model.")) p.theirs = p.theirs.substr(strlen("model."));
    if (tied) f.erase("lm_head.weight");
    f.config["tie_word_embeddings"] = tied;
    return f;
}

static MemoryModel model_of(const std::string& folder, bool master = true) {
    RunSettings settings = small_settings(LLAMA);
    settings.config = read_model_config(folder);
    settings.keep_masters = master;
    return MemoryModel(settings, 9);
}

static ordered_json config_in(const std::string& folder) {
    return ordered_json::parse(read_file(folder + "/config.json"));
}

// The config.json that is saved of a model without a folder: every field is this program's.
static ordered_json saved_config(const RunSettings& settings) {
    Folder folder;
    MemoryModel model(settings, 1);
    return config_in(save(folder / "out", model, 1));
}

static ModelConfig read_config(const ordered_json& config) {
    Folder folder;
    folder.write("config.json", config.dump());
    return read_model_config(folder);
}
static ModelConfig read_fields(HuggingFace f, const ordered_json& fields) {
    f.config.update(fields);
    return read_config(f.config);
}

static void check_fields(const ordered_json& found, const std::string& text) {
    const ordered_json expected = ordered_json::parse(text);
    for (const auto& [field, value] : expected.items()) {
        INFO(field);
        CHECK(found.value(field, ordered_json("missing")) == value);
    }
}

const ordered_json LLAMA3 =
    ordered_json::parse(R"({"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.5,
    "high_freq_factor": 4.5, "original_max_position_embeddings": 8192})");

TEST_CASE("save_model_folder: config.json has the documented fields of transformers") {
    auto named = [](const char* name) {
        RunSettings settings = small_settings(LLAMA);
        settings.config = find_row(known_models(), name, "");
        settings.config.L = 1;
        settings.config.C = 64;
        settings.config.F = 16;
        settings.config.V = 50;  // small
        return saved_config(settings);
    };
    check_fields(saved_config(small_settings(LLAMA, false)), R"({"architectures": ["LlamaForCausalLM"],
        "model_type": "llama", "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu",
        "rms_norm_eps": 9.999999974752427e-07, "tie_word_embeddings": false, "torch_dtype": "bfloat16"})");
    check_fields(saved_config(small_settings(GPT2)), R"({"architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2", "n_inner": 48, "activation_function": "gelu_new",
        "layer_norm_epsilon": 9.999999974752427e-07, "tie_word_embeddings": true})");
    check_fields(named("llama-3.2-1b"), R"({"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3",
        "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}, "max_position_embeddings": 131072,
        "tie_word_embeddings": true, "bos_token_id": null})");
    // Where sliding_window is missing, transformers assumes 4096.
    check_fields(named("mistral-7b"), R"({"architectures": ["MistralForCausalLM"], "model_type": "mistral",
        "rope_theta": 1000000.0, "sliding_window": null})");
    check_fields(named("qwen2.5-0.5b"), R"({"architectures": ["Qwen2ForCausalLM"]})");
}

TEST_CASE("read_model_config: defaults of missing fields and all spellings of scaled frequencies") {
    ordered_json config = hugging_face_llama().config;
    for (const char* field : {"num_key_value_heads", "rms_norm_eps", "rope_theta", "hidden_act",
                              "tie_word_embeddings", "max_position_embeddings"})
        config.erase(field);
    ModelConfig c = read_config(config);
    CHECK(c.NKV == 4);
    CHECK(c.norm_eps == 1e-6f);
    CHECK(c.rope_theta == 10000.0f);
    CHECK(!c.tied);
    CHECK(c.max_T == 2048);
    config.update({{"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 500000.0}}},
                   {"rope_scaling", {{"type", "default"}, {"rope_theta", 7}}},
                   {"head_dim", 16}});
    c = read_config(config);
    CHECK(c.rope_theta == 7);
    CHECK(c.HS() == 16);
    CHECK(c.rope_scaling.type == RopeScaling::Default);
    config["rope_scaling"] = nullptr;
    CHECK(read_config(config).rope_theta == 500000.0f);
    ordered_json theta = LLAMA3;
    theta["rope_theta"] = 7.0;
    // transformers prefers a rope_scaling that is not empty, and the rope_theta in it.
    for (const auto& [fields, expected] : std::vector<std::pair<ordered_json, float>>{
             {{{"rope_scaling", LLAMA3}}, 12345},
             {{{"rope_parameters", LLAMA3}, {"rope_scaling", nullptr}}, 12345},
             {{{"rope_parameters", theta}, {"rope_scaling", ordered_json::object()}}, 7},
             {{{"rope_parameters", {{"rope_type", "yarn"}}}, {"rope_scaling", LLAMA3}}, 12345}}) {
        CAPTURE(fields.dump());
        const ModelConfig read = read_fields(hugging_face_llama(), fields);
        const RopeScaling& s = read.rope_scaling;
        CHECK(read.rope_theta == expected);
        CHECK(s.type == RopeScaling::Llama3);
        CHECK(s.factor == 32);
        CHECK(s.low_freq_factor == 1.5f);
        CHECK(s.high_freq_factor == 4.5f);
        CHECK(s.original_positions == 8192);
    }
}

TEST_CASE("read_model_config: a sliding window limits --seq in models and layers that have one") {
    for (const auto& [type, fields, expected] : std::vector<std::tuple<std::string, std::string, int64_t>>{
             {"mistral", R"({"sliding_window": null})", 0},
             {"mistral", R"({"sliding_window": 2048})", 2048},
             {"mistral", "{}", 4096},
             {"qwen2", R"({"use_sliding_window": false, "sliding_window": 2048})", 0},
             // Layers from max_window_layers on have the window (28 if the field is missing); there is one.
             {"qwen2", R"({"use_sliding_window": true, "sliding_window": 9, "max_window_layers": 1})", 0},
             {"qwen2", R"({"use_sliding_window": true, "sliding_window": 9})", 0},
             {"qwen3", R"({"use_sliding_window": true, "sliding_window": 9, "max_window_layers": 99})", 0},
             {"qwen2", R"({"use_sliding_window": true, "sliding_window": 9, "max_window_layers": 0})", 9},
             {"qwen3", R"({"use_sliding_window": true, "max_window_layers": 0})", 4096},
             {"qwen3", R"({"use_sliding_window": true, "sliding_window": null, "max_window_layers": 0})", 0},
             // transformers follows layer_types where it is given.
             {"qwen2", R"({"use_sliding_window": true, "layer_types": ["sliding_attention"]})", 4096},
             {"qwen2", R"({"use_sliding_window": true, "sliding_window": 9, "max_window_layers": 0,
                           "layer_types": ["full_attention"]})",
              0},
             {"qwen2", R"({"use_sliding_window": false, "layer_types": ["sliding_attention"]})", 0},
             {"llama", R"({"sliding_window": 8})", 0}}) {  // not a field of Llama
        CAPTURE(fields);
        HuggingFace f = hugging_face_llama(type);
        f.config.erase("sliding_window");
        f.config["max_position_embeddings"] = 100000;
        const ModelConfig c = read_fields(f, ordered_json::parse(fields));
        CHECK(c.sliding_window == expected);
        CHECK((c.longest_sequence() == (expected ? expected : 100000)));
    }
}

TEST_CASE("read_model_config: an unsupported config.json is rejected by the name of its field") {
    Folder folder;
    const std::string path = folder / "config.json";
    auto rejected = [&](ordered_json config, const std::string& field, const ordered_json& value,
                        const std::string& says) {
        config[field] = value;
        INFO(field, " ", value.dump());
        write_file(path, config.dump());
        check_error([&] { read_model_config(folder); }, folder, says);
    };
    // A field, its value, and, where it is not the field, what the error says.
    for (const auto& [good, rows] : {std::pair{hugging_face_llama().config, R"(
head_dim 0; vocab_size 0 | vocab_size; vocab_size 1e30; model_type "qwen3_moe" | qwen3; model_type 3;
hidden_act "gelu";
hidden_size -32; hidden_size "32"; hidden_size 1.5; hidden_size null; hidden_size 40 | multiples of 16;
num_hidden_layers 5000 | from 1 to 4096; num_key_value_heads 3 | heads; partial_rotary_factor 0.5;
rms_norm_eps "small"; rms_norm_eps -1; rope_theta 0; tie_word_embeddings "yes"; use_sliding_window true;
rope_parameters 5; rope_parameters "llama3"; rope_scaling "llama3"; rope_scaling {"type": 3} | type;
rope_scaling {"rope_type": "yarn", "factor": 8.0} | rope_type; rope_parameters {"rope_type": 3} | rope_type;
quantization_config {"quant_method": "fp8"}; quantization {"bits": 4, "group_size": 64};
compression_config {}; quantization_config "gptq"; layer_types ["sliding_attention"]; layer_types 5;
layer_types ["linear_attention"]; layer_types [null];
rope_scaling {"type": "dynamic", "factor": 8.0} | type; rope_scaling {"type": "linear", "factor": 2} | type;
rope_parameters {"rope_type": "default", "partial_rotary_factor": 0.5} | partial_rotary_factor)"},
                                     {hugging_face_gpt2().config, R"(
activation_function "gelu"; activation_function "relu"; scale_attn_weights false; n_layer null; n_head 0;
scale_attn_by_inverse_layer_idx true; n_embd 32768 | hidden size)"}})
        for (const std::string& row : rows_of(rows)) {
            const size_t space = row.find(' '), bar = row.find(" | ");
            rejected(good, row.substr(0, space), ordered_json::parse(row.substr(space, bar - space)),
                     bar == row.npos ? row.substr(0, space) : row.substr(bar + 3));
        }
    for (const auto& [field, value] : LLAMA3.items()) {
        ordered_json rope = LLAMA3;
        rope.erase(field);
        if (field != "rope_type") rejected(hugging_face_llama().config, "rope_scaling", rope, field);
        rope[field] =
            field == "high_freq_factor" ? ordered_json(1.5) : ordered_json("8");  // 1.5 would divide by zero
        rejected(hugging_face_llama().config, "rope_parameters", rope, field);
    }
    for (const char* text : {"", "[]", "{"}) {
        write_file(path, text);
        check_error([&] { read_model_config(folder); }, path);
    }
    check_error([&] { read_model_config(folder / "none"); }, folder / "none/config.json");
}

TEST_CASE("load_weights: reads Hugging Face folders of every architecture and dtype and number of shards") {
    HuggingFace gpt2 = hugging_face_gpt2();
    gpt2.pieces.push_back({"", "transformer.h.0.attn.bias", 16, 16});  // a buffer
    gpt2.pieces.push_back({"", "transformer.h.0.attn.masked_bias", 1, 1});
    for (HuggingFace f : {hugging_face_llama(), hugging_face_llama("mistral"), hugging_face_llama("qwen2"),
                          hugging_face_llama("qwen3"), gpt2, hugging_face_gpt2(""), without_prefix(true),
                          without_prefix(false)})
        for (const auto& [dtype, bits] : {std::pair{"F32", ~0u}, {"F16", 0xFFFFE000u}, {"BF16", 0xFFFF0000u}})
            for (size_t shards : {1, 3}) {
                INFO(f.config.at("model_type").get<std::string>(), ", ", dtype, ", ", shards, " shards");
                for (HuggingFace::Piece& p : f.pieces) p.dtype = dtype;
                Folder folder;
                f.write(folder, shards);
                MemoryModel model = model_of(folder), lean = model_of(folder, false);
                CHECK(model.settings().config.arch.name == f.config.at("model_type").get<std::string>());
                load_weights(folder, model);
                f.check(model, bits);
                // What is saved again has the names and shapes of the file, and of BF16 the same bytes.
                fs::create_directory(folder / "saved");
                save_model_folder(folder / "saved", model, {});
                const Safetensors all(folder), saved(folder / "saved");
                for (const auto& [name, t] : saved.tensors()) {
                    const size_t prefix = all.tensors().count(name) ? 0 : name.find('.') + 1;
                    const HfTensor& from = all.find_tensor(name.substr(prefix), t.shape, dtype);
                    CHECK(t.dtype == "BF16");
                    CHECK((dtype != t.dtype || !std::memcmp(t.data, from.data, t.bytes)));
                }
                CHECK(saved.tensors().size() + (f.pieces.back().ours.empty() ? 2 : 0) == f.pieces.size());
                load_weights(folder, lean);  // --master none: rounded to the nearest BF16
                for (const StateTensor& t : weight_tensors(lean.settings().config))
                    CHECK((model.tensors.at(t.name) == lean.tensors.at(t.name)));
            }
}

TEST_CASE("load_weights: all finite F16 values and any F32 value give exact masters; other values an error") {
    HuggingFace f = hugging_face_llama();
    HuggingFace::Piece &embedding = f.at("embed_tokens.weight"), &head = f.at("lm_head.weight");
    f.config["vocab_size"] = embedding.rows = head.rows = 65536 / 32;
    embedding.dtype = "F16";
    SEEDED_RANDOM(random);
    for (uint32_t i = 0; i < 65536; i++) {
        embedding.codes.push_back((i >> 10 & 31) == 31 ? 0 : i);
        head.codes.push_back(i % 4 ? uint32_t(random.bits()) : i << 16 | 0x8000);  // a tie of two BF16 values
        if ((head.codes[i] & 0x7F800000) >= 0x7F000000) head.codes[i] &= 0xBFFFFFFF;  // finite, also as BF16
    }
    Folder folder;
    f.write(folder);
    MemoryModel model = model_of(folder);
    load_weights(folder, model);
    const std::vector<Param> params = parameters(model.settings().config);
    int64_t wrong = 0;
    for (uint32_t i = 0; i < 65536; i++) {
        const float half =
            float(value_of_code(int(embedding.codes[i]), /*M=*/10, /*bias=*/15, /*sign=*/0x8000));
        wrong += bits_of(model.master(params.front(), i)) != bits_of(half);
        wrong += bits_of(model.master(params.back(), i)) != head.codes[i];
    }
    CHECK(wrong == 0);
    RunSettings second = model.settings();
    second.rank = 1;
    second.ranks = 3;
    MemoryModel part(second, 1);
    load_weights(folder, part);
    for (const std::string& name : {params.back().name, params.back().name + ".remainder"})
        CHECK(model.tensors.at(name).substr(2 * owned(second, params.back()).first,
                                            part.tensors.at(name).size()) == part.tensors.at(name));
    auto rejected = [&](const std::string& tensor, uint32_t code) {
        HuggingFace bad = f;
        bad.at(tensor).codes.assign(size_t(bad.at(tensor).rows * bad.at(tensor).cols), 0);
        bad.at(tensor).codes[2] = code;
        bad.write(folder);
        check_error([&] { load_weights(folder, model); }, folder, tensor);
    };
    // NaN and infinities, NaNs whose upper half would round to zeros, and what would round to infinity.
    for (uint32_t code : {0x7FC00000u, 0x7F800000u, 0xFF800000u, 0x7FFFFFFFu, 0xFFFFFFFFu, 0x7F7FFFFFu})
        rejected("model.norm.weight", code);
    rejected("embed_tokens.weight", 0x7C00);  // infinity in F16
}

TEST_CASE("load_weights: a tied model may have a copy of its embedding as lm_head.weight but no other head") {
    HuggingFace qwen3 = hugging_face_llama("qwen3"), gpt2 = hugging_face_gpt2(), bare = without_prefix(true);
    qwen3.config["tie_word_embeddings"] = true;
    gpt2.pieces.push_back({"head", "lm_head.weight", 50, 32});
    bare.pieces.push_back({"head", "lm_head.weight", 50, 32});
    for (HuggingFace f : {qwen3, gpt2, bare})
        for (const std::string dtype : {"BF16", "F16", "F32"})
            for (const size_t shards : {1, 2}) {
                INFO(f.config.at("model_type").get<std::string>(), ", ", dtype, ", ", shards, " shards");
                const size_t embedding = size_t(&f.at("embed_tokens.weight", "wte.weight") - f.pieces.data());
                HuggingFace::Piece& head = f.at("lm_head.weight");
                f.pieces[embedding].dtype = "BF16";
                head.dtype = dtype;
                head.codes.clear();
                for (int64_t e = 0; e < head.rows * head.cols; e++) {
                    const float exact = HuggingFace::value(embedding, e / head.cols, e % head.cols);
                    head.codes.push_back(f.code(dtype, bits_of(exact) & 0xFFFF0000));
                }
                Folder folder;
                f.write(folder, shards);
                MemoryModel model = model_of(folder);
                load_weights(folder, model);
                for (int64_t e : {0, 1, 50 * 32 - 1})
                    CHECK(model.master(parameters(model.settings().config)[0], e) ==
                          std::bit_cast<float>(bits_of(HuggingFace::value(embedding, e / 32, e % 32)) &
                                               0xFFFF0000));
                fs::create_directory(folder / "saved");
                save_model_folder(folder / "saved", model, {});
                CHECK(!Safetensors(folder / "saved").tensors().count("lm_head.weight"));
                for (const size_t at : {size_t(0), head.codes.size() - 1}) {
                    HuggingFace other = f;
                    other.at("lm_head.weight").codes[at] ^= 1;  // the next number
                    other.write(folder, shards);
                    check_error([&] { load_weights(folder, model); }, folder, "lm_head.weight");
                }
                HuggingFace transposed = f;
                transposed.at("lm_head.weight").shape = {32, 50};
                transposed.write(folder, shards);
                check_error([&] { load_weights(folder, model); }, folder, "lm_head.weight");
            }
}

TEST_CASE("load_weights: missing or unknown or misshapen tensors change nothing in the model") {
    // The architecture, what happens to which tensor, and a shape or dtype.
    for (const std::string& row : rows_of(R"(
llama erase up_proj.weight; llama erase lm_head.weight; qwen2 erase v_proj.bias; qwen3 erase k_norm.weight;
llama shape q_proj.weight 16 32; llama shape down_proj.weight 48 32; llama shape model.norm.weight 1 32;
qwen2 shape v_proj.bias 32; llama add model.layers.0.self_attn.q_proj.bias; gpt2 add lm_head.weight;
llama add model.layers.1.input_layernorm.weight; llama dtype k_proj.weight I16; llama tie lm_head.weight)"))
        for (size_t shards : {1, 2}) {
            CAPTURE(row);
            std::istringstream words(row);
            std::string type, action, name;
            words >> type >> action >> name;
            HuggingFace f = type == "gpt2" ? hugging_face_gpt2() : hugging_face_llama(type);
            if (action == "erase") f.erase(name);
            if (action == "add") f.pieces.push_back({"", name, 32, 1});
            if (action == "dtype") words >> f.at(name).dtype;
            if (action == "tie") f.config["tie_word_embeddings"] = true;
            for (int64_t n; words >> n;) f.at(name).shape.push_back(n);
            Folder folder;
            f.write(folder, shards);
            MemoryModel model = model_of(folder);
            check_error([&] { load_weights(folder, model); }, folder, name);
            CHECK(model.writes == 0);
        }
}

TEST_CASE("train: config.json and the tokenizer's files go from the model folder to every checkpoint") {
    RunFolder folder;
    HuggingFace f = hugging_face_llama("mistral");
    f.at("embed_tokens.weight").rows = f.at("lm_head.weight").rows = 256;
    f.config.erase("sliding_window");  // missing and null differ in transformers
    f.config.update({{"vocab_size", 256},
                     {"torch_dtype", "float32"},
                     {"dtype", "float32"},
                     {"pad_token_id", nullptr},
                     {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 500000.0}}},
                     {"eos_token_id", {8, 9}},
                     {"_name_or_path", "someone/\u00e9"},
                     {"unknown", {{"deep", {1, nullptr, "text"}}}}});
    f.write(folder / "model");
    ordered_json config = f.config;  // as it must be saved
    config.erase("dtype");           // what transformers 5 calls torch_dtype
    config["torch_dtype"] = "bfloat16";
    std::map<std::string, std::string> expected;
    for (const std::string name :
         {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
          "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
          "generation_config.json", "additional_chat_templates/tool_use.jinja", "tekken.json", "vocab.txt",
          "spiece.model", "tokenizer.model.v3", "qwen.tiktoken", "tokenization_qwen.py"}) {
        expected[name] = name + std::string("\r\n\0\xFF\n\n", 6);
        folder.write("model/" + name, expected[name]);
    }
    for (const char* name :
         {"README.md", "more.safetensors", "runs/step-000001/tokenizer.json", ".git/tokenizer.json"})
        folder.write(concat("model/", name), "no file of the model");
    folder.write("tokens.bin", token_file(std::vector<uint16_t>(1000, 7)));
    require_success(tiny(folder, "--data tokens.bin --steps 2 --warmup 0 --model model"));
    fs::rename(folder / "model", folder / "moved");  // a resumed run takes them from the checkpoint
    require_success(train(folder, "--device cpu --resume out --steps 3 --out next"));
    for (const char* checkpoint : {"out/step-000002", "next/step-000003"}) {
        CAPTURE(checkpoint);
        CHECK(config_in(folder / checkpoint) == config);
        std::map<std::string, std::string> found = files_below(folder / checkpoint);
        for (const char* own : {"config.json", "model.safetensors", "optimizer.state", "trainer.json"})
            CHECK(found.erase(own) == 1);
        CHECK((found == expected));
    }
    const std::string path = folder / "moved/tokenizer.json";
    fs::remove(path);
    fs::create_symlink("merges.txt", path);  // as in the cache of Hugging Face
    CHECK((read_other_files(folder / "moved").at("tokenizer.json") == expected["merges.txt"]));
}

TEST_CASE("train: token files of another tokenizer are no tokens of a model; added tokens change nothing") {
    RunFolder folder;
    fs::copy(small_model(), folder.path / "chat");
    folder.write("train.bin", token_file(std::vector<uint16_t>(1000, 7)));
    struct Row {
        const char* file;
        std::string of_model, of_data;
        bool differ;
    };
    const auto list = [](const std::string& vocabulary, const std::string& more = "") {
        return "{" + more + "\"model\": {\"type\": \"BPE\", \"vocab\": {" + vocabulary + "}}}";
    };
    const std::string ab = "\"a\": 0, \"b\": 1", ba = "\"b\": 1, \"a\": 0", other = "\"a\": 1, \"b\": 0";
    for (const auto& [file, of_model, of_data, differ] :
         {Row{"tokenizer.bin", tokenizer_file({"a", "b"}), tokenizer_file({"a", "b"}), false},
          {"tokenizer.bin", tokenizer_file({"a", "b"}), tokenizer_file({"a", "b", "<added>"}), false},
          {"tokenizer.bin", tokenizer_file({"a", "b"}), tokenizer_file({"b", "a"}), true},
          {"tokenizer.json", list(ab), list(ba), false},
          {"tokenizer.json", list(ab), list(ab, "\"added_tokens\": [{\"id\": 2}], "), false},
          {"tokenizer.json", list(ab), list(other), true},
          {"tokenizer.json", list(ab), "{}", false},  // Python has tokenizers of other kinds
          {"tokenizer.json", "no JSON", list(ab), false}}) {
        INFO(std::string(file), ": ", of_model, ", ", of_data);
        folder.write(concat("chat/", file), of_model);
        folder.write(file, of_data);
        const std::string flags = TINY + "--model chat --data train.bin --steps 0 ";
        if (differ)
            check_rejected(folder, flags, "--data has tokens of another tokenizer than that of chat; make");
        else require_success(train(folder, flags));
        fs::remove(folder.path / "chat" / file);
        fs::remove(folder.path / file);
    }
}

TEST_CASE("train: bytes of text are no tokens of a model that has a tokenizer of any kind") {
    RunFolder folder;
    fs::copy(small_model(), folder.path / "chat");
    folder.write("bytes.bin", token_file(std::vector<uint16_t>(1000, 7)));
    for (const std::string name :
         {"tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "tekken.json",
          "tokenizer_config.json", "tokenizer.model.v3", "spiece.model", "qwen.tiktoken"}) {
        folder.write("chat/" + name, "{}");
        check_rejected(folder, TINY + "--model chat --steps 2",
                       "--data contains bytes of text, which are no tokens of chat: it has a tokenizer (" +
                           name + "); python3 data/tokenize.py --tokenizer chat --out tokens text");
        require_success(tiny(folder, "--model chat --data bytes.bin --steps 0"));
        fs::remove(folder.path / "chat" / name);
    }
    require_success(tiny(folder, "--model chat --steps 0"));  // without a tokenizer bytes are its tokens
    folder.write("chat/tokenizer.bin", tokenizer_file({"a", "b"}));
    check_rejected(folder, TINY + "--model chat --steps 2", "it was trained on token files");
    fs::remove(folder.path / "chat/tokenizer.bin");
    HuggingFace large = hugging_face_llama();  // 256 tokens may be bytes, more are hardly
    for (const char* name : {"embed_tokens.weight", "lm_head.weight"}) large.at(name).rows = 300;
    large.config["vocab_size"] = 300;
    large.write(folder / "large");
    const Ended ended = tiny(folder, "--model large --steps 0");
    require_success(ended);
    CHECK(contains(ended.out,
                   "tokens: the bytes of the text, 256 of the vocabulary's 300, since large "
                   "has no tokenizer\n"));
}

// data/model_folder.cpp - reads and writes Hugging Face's model folders (model_folder.h).
#include "model_folder.h"

#include <bit>
#include <cstring>
#include <set>

#include "files.h"
#include "json.h"
#include "safetensors.h"

namespace coat {

// -----------------------------------------------------------------------------------------------------------
// config.json

namespace {

// What a missing field of config.json means.
enum class Missing : uint8_t { IsError, KeepsDefault };

}  // namespace

// The fields of config.json that are values of ModelConfig: visit(name in all models but GPT-2, name in
// GPT-2, value, what it means if it is missing). Where the name is null, the field does not exist.
template <class Visit> static void visit_fields(ModelConfig& config, const Visit& visit) {
    visit("num_hidden_layers", "n_layer", config.L, Missing::IsError);
    visit("hidden_size", "n_embd", config.C, Missing::IsError);
    visit("num_attention_heads", "n_head", config.NH, Missing::IsError);
    visit("num_key_value_heads", nullptr, config.NKV);
    visit("head_dim", nullptr, config.head_size);
    visit("intermediate_size", "n_inner", config.F);
    visit("vocab_size", "vocab_size", config.V, Missing::IsError);
    visit("max_position_embeddings", "n_positions", config.max_T);
    visit("rms_norm_eps", "layer_norm_epsilon", config.norm_eps);
    visit("tie_word_embeddings", "tie_word_embeddings", config.tied);
    visit("rope_theta", nullptr, config.rope_theta);
}
// The fields of rope_scaling if its type is llama3.
template <class Visit> static void visit_fields(RopeScaling& s, const Visit& visit) {
    visit("factor", nullptr, s.factor, Missing::IsError);
    visit("low_freq_factor", nullptr, s.low_freq_factor, Missing::IsError);
    visit("high_freq_factor", nullptr, s.high_freq_factor, Missing::IsError);
    visit("original_max_position_embeddings", nullptr, s.original_positions, Missing::IsError);
}

template <class Values> static void read_fields(Values& values, bool gpt2, const Fields& f) {
    visit_fields(values, [&](const char* others, const char* of_gpt2, auto& value,
                             Missing missing = Missing::KeepsDefault) {
        const char* const name = gpt2 ? of_gpt2 : others;
        if (!name || (missing == Missing::KeepsDefault && !f.has(name))) return;
        if (f.has(name) && f.object[name] == 0) f.reject(name, "above 0");
        value = f.get<std::decay_t<decltype(value)>>(name);
    });
}
template <class Values> static void write_fields(Values& values, bool gpt2, ordered_json& object) {
    visit_fields(values, [&](const char* others, const char* of_gpt2, const auto& value, Missing = {}) {
        const char* const name = gpt2 ? of_gpt2 : others;
        if (name) object[name] = value;
    });
}

// Fields that change a model's arithmetic but not its tensors, with the values that are implemented.
const json IMPLEMENTED = {
    {"hidden_act", {"silu", "swish"}},
    {"partial_rotary_factor", {1.0}},
    {"activation_function", {"gelu_new", "gelu_pytorch_tanh"}},
    {"scale_attn_weights", {true}},
    {"scale_attn_by_inverse_layer_idx", {false}},
    {"rope_type", {"default", "llama3"}},
    {"type", {"default", "llama3"}},
};

static void require_implemented(const Fields& f) {
    for (const auto& [field, values] : IMPLEMENTED.items())
        if (f.has(field) && !std::count(values.begin(), values.end(), f.object[field]))
            f.reject(field, "one of " + values.dump());
}

// Some tools write quantized weights with the names and shapes of those that are not, so that their tensors
// would be read. These are the fields of transformers, of MLX, and of older versions of compressed-tensors.
static void require_not_quantized(const Fields& f) {
    for (const char* field : {"quantization_config", "quantization", "compression_config"})
        if (f.has(field))
            throw Error(f.path, " has the field ", field, ", so the weights are quantized, which is not ",
                        "supported; give a folder with weights in BF16, F16 or F32.");
}

// The sliding window of a model's attention in tokens; 0 if no layer has one. All of this is as transformers
// reads config.json: a field that is missing has a default there, and null says that there is no window.
static int64_t sliding_window(const Fields& f, const ModelConfig& config) {
    constexpr int64_t DEFAULT_WINDOW = 4096, DEFAULT_MAX_WINDOW_LAYERS = 28;
    const std::string arch = config.arch.name;
    const bool qwen = arch == "qwen2" || arch == "qwen3";
    const int64_t otherwise = f.object.contains("sliding_window") ? 0 : DEFAULT_WINDOW;
    if (arch == "mistral") return f.get<int64_t>("sliding_window", otherwise);  // all layers have it

    const json FULL = "full_attention", SLIDING = "sliding_attention";
    const bool lists_layers = f.has("layer_types");
    const json layers = lists_layers ? f.object["layer_types"] : json::array();
    auto is_known = [&](const json& type) { return type == FULL || (qwen && type == SLIDING); };
    if (!layers.is_array() || !std::all_of(layers.begin(), layers.end(), is_known))
        f.reject("layer_types",
                 qwen ? "a list of full_attention and sliding_attention" : "a list of full_attention");
    if (!f.get<bool>("use_sliding_window", false)) return 0;
    if (!qwen) f.reject("use_sliding_window", "false");
    // The first max_window_layers layers attend to all tokens, unless layer_types says it for each layer.
    const int64_t first = f.get<int64_t>("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS);
    const bool in_some_layer =
        lists_layers ? std::count(layers.begin(), layers.end(), SLIDING) > 0 : first < config.L;
    return in_some_layer ? f.get<int64_t>("sliding_window", otherwise) : 0;
}

// Reads the frequencies of RoPE. transformers 5 has renamed rope_scaling as rope_parameters, but if a file
// has both, and rope_scaling has fields, transformers 5 uses rope_scaling, as we do.
static void read_rope(const Fields& f, ModelConfig& config) {
    Fields rope = f.get<Fields>("rope_scaling", Fields{f.path, json::object()});
    if (rope.object.empty()) rope = f.get<Fields>("rope_parameters", rope);
    require_implemented(rope);
    config.rope_theta = rope.get<float>("rope_theta", config.rope_theta);
    const char* const type = rope.has("rope_type") ? "rope_type" : "type";  // "type" in older files
    if (rope.get<std::string>(type, "default") != "llama3") return;
    RopeScaling& scaling = config.rope_scaling;
    scaling.type = RopeScaling::Llama3;
    read_fields(scaling, false, rope);
    if (scaling.low_freq_factor >= scaling.high_freq_factor)
        rope.reject("high_freq_factor", "above low_freq_factor");
}

ModelConfig read_model_config(const std::string& folder) {
    const Fields f = read_json(path_in(folder, "config.json"));
    ModelConfig config{};
    config.name = folder;
    config.arch = find_row(std::array{LLAMA, MISTRAL, QWEN2, QWEN3, GPT2}, f.get<std::string>("model_type"),
                           (f.path + ": the field model_type").c_str());
    require_not_quantized(f);
    require_implemented(f);
    // These are the values in transformers of fields that are missing.
    const bool gpt2 = !config.arch.rope;
    config.max_T = gpt2 ? 1024 : 2048;
    config.norm_eps = gpt2 ? 1e-5f : 1e-6f;
    config.tied = gpt2;
    read_fields(config, gpt2, f);
    if (!config.NKV) config.NKV = config.NH;
    if (!config.F && gpt2) config.F = 4 * config.C;
    config.sliding_window = sliding_window(f, config);
    read_rope(f, config);
    require_supported(config);
    return config;
}

// config.json of a model that does not come from a folder.
static ordered_json config_json(ModelConfig config) {
    const bool gpt2 = !config.arch.rope;
    config.head_size = config.HS();
    ordered_json object = {{"architectures", {config.arch.transformers_class}},
                           {"model_type", config.arch.name}};
    write_fields(config, gpt2, object);
    if (gpt2) {
        object["activation_function"] = "gelu_new";
        for (const char* dropout : {"attn_pdrop", "embd_pdrop", "resid_pdrop"}) object[dropout] = 0;
    } else {
        object["hidden_act"] = "silu";
        object["sliding_window"] = nullptr;
    }
    if (config.rope_scaling.type == RopeScaling::Llama3) {
        object["rope_scaling"]["rope_type"] = "llama3";
        write_fields(config.rope_scaling, false, object["rope_scaling"]);
    }
    // Without these fields transformers assumes the special tokens of the original Llama or GPT-2.
    for (const char* token : {"bos_token_id", "eos_token_id", "pad_token_id"}) object[token] = nullptr;
    return object;
}

// -----------------------------------------------------------------------------------------------------------
// Names and shapes of tensors

// The names in Hugging Face's files for each of our parameters: in all models but GPT-2, and in GPT-2. Our
// parameters are fused: qkv has the rows of three tensors of those files, gate_up those of two, in this
// order.
const std::map<std::string, std::pair<std::vector<std::string>, std::vector<std::string>>> NAMES = {
    {"embedding", {{"model.embed_tokens"}, {"transformer.wte"}}},
    {"positions", {{}, {"transformer.wpe"}}},
    {"norm1", {{"input_layernorm"}, {"ln_1"}}},
    {"qkv", {{"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}, {"attn.c_attn"}}},
    {"qk_norm", {{"self_attn.q_norm", "self_attn.k_norm"}, {}}},
    {"attention_out", {{"self_attn.o_proj"}, {"attn.c_proj"}}},
    {"norm2", {{"post_attention_layernorm"}, {"ln_2"}}},
    {"gate_up", {{"mlp.gate_proj", "mlp.up_proj"}, {"mlp.c_fc"}}},
    {"down", {{"mlp.down_proj"}, {"mlp.c_proj"}}},
    {"final_norm", {{"model.norm"}, {"transformer.ln_f"}}},
    {"head", {{"lm_head"}, {"lm_head"}}},
};

namespace {

// One tensor of a Hugging Face file, which is a part of one of our parameters.
struct Piece {
    std::string name;            // in the file
    std::vector<int64_t> shape;  // in the file
    int64_t first, size;         // the elements of the parameter: `size` of them, from `first` on
    bool transposed;             // the shape is (in, out), as in linear layers of GPT-2: one piece is all

    // The index in the parameter of element i of the file's tensor.
    int64_t index_in_param(int64_t i) const {
        if (!transposed) return first + i;
        const int64_t row = i / shape[1], col = i % shape[1];
        return col * shape[0] + row;
    }
};

}  // namespace

// The pieces of one parameter, without the rows that pad our vocabulary. A vector counts as one column.
static std::vector<Piece> pieces(const ModelConfig& config, const Param& p) {
    // The parts of a name such as "layers.3.qkv.bias": the layer is 3, ours is "qkv", and the end is "bias".
    char ours[32], end[8] = "weight";
    int64_t layer = -1;  // it stays -1 if the parameter is in no layer
    if (std::sscanf(p.name.c_str(), "layers.%ld.%31[^.].%7s", &layer, ours, end) == 0)
        std::sscanf(p.name.c_str(), "%31[^.].%7s", ours, end);
    const bool gpt2 = !config.arch.rope;
    const auto& names = gpt2 ? NAMES.at(ours).second : NAMES.at(ours).first;
    const std::string layers = gpt2 ? "transformer.h." : "model.layers.";
    const std::string before = layer < 0 ? "" : concat(layers, layer, ".");
    const bool is_vector = p.is_vector(), transposed = gpt2 && p.is_linear_weight();
    const int64_t cols = is_vector ? 1 : p.cols, all_rows = used_elements(config, p) / cols;

    std::vector<int64_t> rows(names.size(), all_rows / std::max<int64_t>(1, std::ssize(names)));
    if (names.size() == 3) rows = {config.q_cols(), config.kv_cols(), config.kv_cols()};
    std::vector<Piece> result;
    int64_t first = 0;
    for (size_t i = 0; i < names.size(); i++) {
        std::vector<int64_t> shape = {rows[i], cols};
        if (transposed) shape = {cols, rows[i]};
        if (is_vector) shape = {rows[i]};
        const int64_t size = rows[i] * cols;
        result.push_back({
            .name = concat(before, names[i], ".", end),
            .shape = shape,
            .first = first,
            .size = size,
            .transposed = transposed,
        });
        first += size;
    }
    return result;
}

// Files of a model without its head, such as those of GPT-2 itself or of a LlamaModel of transformers, leave
// out the first part of the names, "transformer." or "model.".
static const HfTensor& tensor_of(const Safetensors& files, const Piece& piece) {
    const std::string bare = piece.name.substr(piece.name.find('.') + 1);
    const bool is_bare = !files.tensors().count(piece.name) && files.tensors().count(bare);
    return files.find_tensor(is_bare ? bare : piece.name, piece.shape, "BF16 F16 F32");
}

// -----------------------------------------------------------------------------------------------------------
// Weights

// Element i of a tensor in a file, at any alignment, as the bits of an FP32 number, which weight and
// remainder are cut from (reference/rounding.h, split_master). Files and machine are little-endian.
static uint32_t f32_bits(const HfTensor& tensor, int64_t i) {
    const int width = tensor.dtype == "F32" ? 4 : 2;
    uint32_t bits = 0;
    std::memcpy(&bits, tensor.data + width * i, width);
    if (tensor.dtype == "F32") return bits;
    if (tensor.dtype == "BF16") return bits << 16;
    // F16 has 5 bits of exponent with bias 15, in place of 8 with bias 127, and 10 bits of mantissa.
    constexpr uint32_t LARGEST_EXPONENT = 31u << 23;  // of infinity and NaN
    const uint32_t sign = (bits & 0x8000) << 16, magnitude = (bits & 0x7FFF) << 13;
    const bool finite = magnitude < LARGEST_EXPONENT;
    const float value = finite ? std::bit_cast<float>(magnitude) * 0x1p112f : INFINITY;
    return sign | std::bit_cast<uint32_t>(value);
}

// Whether two tensors have the same shape and the same values. Their dtypes may differ.
static bool equal_values(const HfTensor& a, const HfTensor& b) {
    if (a.shape != b.shape || !is_one_of("BF16 F16 F32", b.dtype)) return false;
    const int64_t elements = a.bytes / (a.dtype == "F32" ? 4 : 2);
    int64_t different = 0;
#pragma omp parallel for reduction(+ : different)
    for (int64_t i = 0; i < elements; i++) different += f32_bits(a, i) != f32_bits(b, i);
    return different == 0;
}

// Writes what this rank owns of a parameter: weight = upper 16 bits of (FP32 bits + 0x8000), remainder =
// lower 16 bits. NaN, infinity and what rounds to infinity are errors: the NaN 0x7FFFFFFF would become the
// weight -0.
static void write_parameter(Model& model, const Param& p, const Safetensors& files) {
    constexpr uint32_t EXPONENT = 0x7F800000;
    const RunSettings& settings = model.settings();
    std::vector<uint16_t> weight(p.size());  // rows that pad the vocabulary stay zero
    std::vector<int16_t> remainder(p.size());
    for (const Piece& piece : pieces(settings.config, p)) {
        const HfTensor& tensor = tensor_of(files, piece);
        int64_t not_finite = 0;
#pragma omp parallel for reduction(+ : not_finite)
        for (int64_t i = 0; i < piece.size; i++) {
            const uint32_t bits = f32_bits(tensor, i), rounded = bits + 0x8000;
            const int64_t at = piece.index_in_param(i);
            weight[at] = uint16_t(rounded >> 16);
            remainder[at] = int16_t(bits & 0xFFFF);
            not_finite += (bits & EXPONENT) == EXPONENT || (rounded & EXPONENT) == EXPONENT;
        }
        if (not_finite)
            throw Error(files.path(), " has NaN, infinity or values beyond BF16 in tensor ", piece.name,
                        "; give other weights.");
    }
    const int64_t mine = owned(settings, p).first;
    model.write(p.name, weight.data() + mine);
    if (settings.keep_masters) model.write(p.name + ".remainder", remainder.data() + mine);
}

// Buffers are tensors of a file that are not learned.
static bool is_buffer(const std::string& name) {
    return name.ends_with(".rotary_emb.inv_freq") || name.ends_with(".attn.bias") ||
           name.ends_with(".attn.masked_bias");
}

// Error unless the files of the folder have the tensors of this model, and no others.
static void require_tensors(const Safetensors& files, const ModelConfig& config) {
    const std::vector<Param> params = parameters(config);
    std::set<const HfTensor*> used;
    for (const Param& p : params)
        for (const Piece& piece : pieces(config, p)) used.insert(&tensor_of(files, piece));
    // A tensor that no piece asks for means another architecture than config.json says, such as one with
    // biases. The files of some tied models, such as Qwen3-0.6B, have the embedding once more as
    // lm_head.weight.
    const Piece of_embedding = pieces(config, params.front()).front();
    const HfTensor& embedding = tensor_of(files, of_embedding);
    for (const auto& [name, tensor] : files.tensors()) {
        if (used.count(&tensor) || is_buffer(name)) continue;
        const bool tied_head = config.tied && name == "lm_head.weight";
        if (tied_head && equal_values(embedding, tensor)) continue;
        if (tied_head)
            throw Error(
                files.path(), " has a tensor lm_head.weight that differs from the embedding, but ",
                "tie_word_embeddings of config.json says that they are the same; correct config.json, ",
                "or give another model.");
        throw Error(files.path(), " has tensor ", name,
                    ", which the model of config.json does not have; give another model.");
    }
}

void require_weights(const std::string& folder, const ModelConfig& config) {
    require_tensors(Safetensors(folder), config);
}

void load_weights(const std::string& folder, Model& model) {
    const ModelConfig& config = model.settings().config;
    const Safetensors files(folder);
    require_tensors(files, config);
    for (const Param& p : parameters(config)) write_parameter(model, p, files);
}

void save_model_folder(const std::string& folder, Model& model, const FileContents& other_files) {
    const ModelConfig& config = model.settings().config;
    const bool writes = model.settings().rank == 0;
    std::vector<HfTensor> tensors;
    for (const Param& p : parameters(config))
        for (const Piece& piece : pieces(config, p))
            tensors.push_back({.name = piece.name, .dtype = "BF16", .shape = piece.shape});
    const std::string path = path_in(folder, "model.safetensors");
    std::ofstream file(writes ? path : "", std::ios::binary);  // other ranks open no file
    file << safetensors_header(tensors);
    for (const StateTensor& t : weight_tensors(config)) {
        const Bytes bytes = gather_whole_tensor(model, t);
        const auto* weight = reinterpret_cast<const uint16_t*>(bytes.data());  // a vector's memory is aligned
        for (const Piece& piece : pieces(config, t.param)) {
            std::vector<uint16_t> part(writes ? piece.size : 0);
            for (int64_t i = 0; i < std::ssize(part); i++) part[i] = weight[piece.index_in_param(i)];
            file.write(reinterpret_cast<const char*>(part.data()), std::ssize(part) * 2);
        }
    }
    if (!writes) return;
    close_and_sync(file, path);
    for (const auto& [name, bytes] : other_files) {
        const fs::path file = path_in(folder, name);
        fs::create_directories(file.parent_path());
        save_file(file.string(), bytes);
        sync(file.parent_path().string());
    }
    // The config.json that the model came with stays as it is, but for the dtype, which has two names.
    ordered_json object = other_files.count("config.json")
                              ? ordered_json::parse(other_files.at("config.json"))
                              : config_json(config);
    object["torch_dtype"] = "bfloat16";
    object.erase("dtype");
    save_file(path_in(folder, "config.json"), object.dump(2) + "\n");
}

// Every rank sends its part to rank 0. If every rank keeps the whole tensor, the first part is all of it. If
// a rank cannot read its part, all ranks end: the others would take what it sends next for this tensor.
Bytes gather_whole_tensor(Model& model, const StateTensor& t) {
    const RunSettings& settings = model.settings();
    Bytes mine(owned(settings, t).count * t.bytes), whole;
    try {
        if (!mine.empty()) model.read(t.name, mine.data());
        if (settings.ranks == 1) return mine;
        whole.reserve(settings.rank ? 0 : t.total_bytes());
        const bool on_all = false;
        for (const Bytes& part : settings.communicator->gather(mine, on_all))
            if (settings.rank == 0 && std::ssize(whole) < t.total_bytes())
                whole.insert(whole.end(), part.begin(), part.end());
    } catch (const std::exception& error) {
        if (!settings.communicator) throw;
        settings.communicator->fail(error.what());
    }
    return whole;
}

}  // namespace coat

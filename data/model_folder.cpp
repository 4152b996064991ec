// data/model_folder.cpp - reads and writes Hugging Face's model folders (model_folder.h).
//
// In order: which rows of which parameter each Hugging Face tensor is (two tables), which field of
// config.json is which size, the companions, and the conversion of weights between a file's dtype and our
// BF16 weight with its remainder.
#include "model_folder.h"

#include <charconv>
#include <set>

#include "../ranks.h"
#include "safetensors.h"

namespace coat {
namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

namespace {

// -----------------------------------------------------------------------------------------------------------
// Names. Our parameters are fused: qkv has the rows of three Hugging Face tensors, gate_up those of two. They
// follow each other in the tables as in the parameter. Weight and bias have the same name but for its end.

struct Family {
    std::string layers;                // what stands before the number of a layer
    std::string prefix;                // files of the bare model leave it out of the names
    bool conv1d;                       // GPT-2's Conv1D stores the weight of a linear layer as (in, out)
    std::map<std::string, std::vector<std::string>> names;  // our name -> theirs
    std::vector<std::string> ignored;  // ends of the names of buffers, which are not learned
};

const Family LLAMA_FAMILY = {"model.layers.", "model.", false, {
    {"embedding", {"model.embed_tokens"}},
    {"norm1", {"input_layernorm"}},
    {"qkv", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}},
    {"attention_out", {"self_attn.o_proj"}},
    {"norm2", {"post_attention_layernorm"}},
    {"gate_up", {"mlp.gate_proj", "mlp.up_proj"}},
    {"down", {"mlp.down_proj"}},
    {"final_norm", {"model.norm"}},
    {"head", {"lm_head"}},
}, {".rotary_emb.inv_freq"}};

const Family GPT2_FAMILY = {"transformer.h.", "transformer.", true, {
    {"embedding", {"transformer.wte"}},
    {"positions", {"transformer.wpe"}},
    {"norm1", {"ln_1"}}, {"qkv", {"attn.c_attn"}}, {"attention_out", {"attn.c_proj"}},
    {"norm2", {"ln_2"}}, {"gate_up", {"mlp.c_fc"}}, {"down", {"mlp.c_proj"}},
    {"final_norm", {"transformer.ln_f"}},
    {"head", {"lm_head"}},
}, {".attn.bias", ".attn.masked_bias"}};

const Family& family(const ModelConfig& c) { return c.arch.rope ? LLAMA_FAMILY : GPT2_FAMILY; }

// A vector counts as a column: a bias of q, k and v has their rows, too.
int64_t cols_of(const Param& p) { return p.rows == 1 ? 1 : p.cols; }

// One tensor of a Hugging Face file: rows [first, first + rows) of one parameter.
struct Piece {
    std::string theirs;
    Param param;
    int64_t first, rows;
    bool transposed;

    std::vector<int64_t> shape() const {  // in the file
        if (param.rows == 1) return {rows};
        return transposed ? std::vector<int64_t>{param.cols, rows} : std::vector<int64_t>{rows, param.cols};
    }
    int64_t size() const { return rows * cols_of(param); }
    // The index in the whole parameter of element i of the file's tensor.
    int64_t index_in_param(int64_t i) const {
        if (!transposed) return first * cols_of(param) + i;
        return (first + i % rows) * param.cols + i / rows;
    }
};

// All pieces of a model, in the order of its parameters.
std::vector<Piece> pieces(const ModelConfig& c) {
    const Family& f = family(c);
    std::vector<Piece> result;
    for (const Param& p : parameters(c)) {
        // "layers.3.qkv.bias" has the layer "3.", the name "qkv" and the end ".bias".
        const size_t number = p.name.rfind("layers.", 0) == 0 ? 7 : 0,
                     begin = number ? p.name.find('.', number) + 1 : 0;
        const std::string layer = p.name.substr(number, begin - number),
                          ours = p.name.substr(begin, p.name.find('.', begin) - begin),
                          end = ends_with(p.name, ".bias") ? ".bias" : ".weight";
        const std::vector<std::string>& names = f.names.at(ours);
        // The rows of each: q, k, v; gate, up; or all without those that pad our vocabulary.
        const std::vector<int64_t> rows =
            names.size() == 3   ? std::vector<int64_t>{c.q_cols(), c.kv_cols(), c.kv_cols()}
            : names.size() == 2 ? std::vector<int64_t>{c.F, c.F}
                                : std::vector<int64_t>{used_elements(c, p) / cols_of(p)};
        int64_t first = 0;
        for (size_t i = 0; i < names.size(); first += rows[i++]) {
            const std::string theirs = (number ? f.layers + layer : "") + names[i] + end;
            result.push_back({theirs, p, first, rows[i], f.conv1d && p.role.linear});
        }
    }
    return result;
}

// -----------------------------------------------------------------------------------------------------------
// config.json

// Fields that change the arithmetic of a model, with the values that this program implements, if present.
using Implemented = std::map<std::string, std::vector<json>>;
const Implemented LLAMA_IMPLEMENTED = {
    {"hidden_act", {"silu", "swish"}}, {"attention_bias", {false}},   {"mlp_bias", {false}},
    {"partial_rotary_factor", {1.0}},  {"quantization_config", {}},
};
const Implemented GPT2_IMPLEMENTED = {
    {"activation_function", {"gelu_new", "gelu_pytorch_tanh"}}, {"scale_attn_weights", {true}},
    {"scale_attn_by_inverse_layer_idx", {false}}, {"add_cross_attention", {false}},
    {"quantization_config", {}},
};

void require_implemented(const Fields& f, const Implemented& table) {
    for (const auto& [field, values] : table) {
        if (!f.has(field) || std::count(values.begin(), values.end(), f.object[field])) continue;
        std::string known;
        for (const json& v : values)
            known += (known.empty() ? " (only " : ", ") + (v.is_string() ? v.get<std::string>() : v.dump());
        f.reject(field, "is ", Fields::excerpt(f.object[field]), ", which this program does not implement",
                 known, known.empty() ? "" : ")", "; give another model");
    }
}

// The shortest decimal that reads back as this float: the file says 1e-05 and not 9.999999747378752e-06.
double shortest(float x) {
    char text[32];
    *std::to_chars(text, text + sizeof text - 1, x).ptr = '\0';
    return std::strtod(text, nullptr);
}

RopeScaling read_rope_scaling(const Fields& rope) {
    require_implemented(rope, {{"partial_rotary_factor", {1.0}}});
    const std::string field = rope.has("rope_type") ? "rope_type" : "type";  // "type" in older files
    if (!rope.has(field)) return {};
    require_implemented(rope, {{field, {std::begin(ROPE_TYPES), std::end(ROPE_TYPES)}}});
    RopeScaling s;
    while (rope.text(field) != ROPE_TYPES[s.type]) s.type = RopeScaling::Type(s.type + 1);
    if (s.type != RopeScaling::Default) s.factor = rope.positive("factor");
    if (s.type != RopeScaling::Llama3) return s;
    s.low_freq_factor = rope.positive("low_freq_factor");
    s.high_freq_factor = rope.positive("high_freq_factor");
    s.original_positions = rope.natural("original_max_position_embeddings");
    if (s.low_freq_factor >= s.high_freq_factor)
        rope.reject("high_freq_factor", "must be above low_freq_factor; give another model");
    return s;
}

ordered_json rope_json(const RopeScaling& s) {
    ordered_json j = {{"rope_type", ROPE_TYPES[s.type]}, {"factor", shortest(s.factor)}};
    if (s.type == RopeScaling::Llama3)
        j.update({{"low_freq_factor", shortest(s.low_freq_factor)},
                  {"high_freq_factor", shortest(s.high_freq_factor)},
                  {"original_max_position_embeddings", s.original_positions}});
    return s.type == RopeScaling::Default ? nullptr : j;
}

// Llama, and the models that are a Llama but for a column of model.h's Architecture.
ModelConfig read_llama(const Fields& f) {
    require_implemented(f, LLAMA_IMPLEMENTED);
    // transformers 5 calls rope_scaling rope_parameters; it, too, prefers a rope_scaling with fields.
    Fields rope = f.inner("rope_scaling");
    if (rope.object.empty()) rope = f.inner("rope_parameters");
    ModelConfig c{};
    c.L = f.natural("num_hidden_layers");
    c.C = f.natural("hidden_size");
    c.NH = f.natural("num_attention_heads");
    c.NKV = f.natural("num_key_value_heads", c.NH);
    c.F = f.natural("intermediate_size");
    c.V = f.natural("vocab_size");
    c.max_T = f.natural("max_position_embeddings", 2048);
    c.tied = f.boolean("tie_word_embeddings", false);
    c.norm_eps = f.positive("rms_norm_eps", 1e-6f);
    c.rope_theta = rope.positive("rope_theta", f.positive("rope_theta", 10000.0f));
    c.rope_scaling = read_rope_scaling(rope);
    c.head_size = f.natural("head_dim", 0);
    return c;
}

ordered_json llama_json(const ModelConfig& c) {
    const ordered_json window = c.window ? ordered_json(c.window) : ordered_json();
    const std::map<std::string, ordered_json> more = {  // by model_type
        {"llama", {{"attention_bias", false}, {"mlp_bias", false}}},
        {"mistral", {{"sliding_window", window}}},
        {"qwen2", {{"use_sliding_window", c.window > 0}, {"sliding_window", window}}}};
    ordered_json j = {
        {"hidden_size", c.C}, {"intermediate_size", c.F}, {"num_hidden_layers", c.L},
        {"num_attention_heads", c.NH}, {"num_key_value_heads", c.NKV}, {"head_dim", c.HS()},
        {"vocab_size", c.V}, {"max_position_embeddings", c.max_T}, {"hidden_act", "silu"},
        {"rms_norm_eps", shortest(c.norm_eps)}, {"rope_theta", shortest(c.rope_theta)},
        {"rope_scaling", rope_json(c.rope_scaling)}};
    j.update(more.at(c.arch.name));
    return j;
}

// A missing sliding_window is 4096 in transformers; null is none.
ModelConfig read_mistral(const Fields& f) {
    ModelConfig c = read_llama(f);
    c.window = f.object.contains("sliding_window") ? f.natural("sliding_window", 0) : 4096;
    return c;
}

// Qwen2 has a window in some layers only: those that layer_types lists, or those from max_window_layers on.
ModelConfig read_qwen2(const Fields& f) {
    ModelConfig c = read_llama(f);
    const json types = f.has("layer_types") ? f.object["layer_types"] : json();
    const bool slides = types.is_null() ? f.natural("max_window_layers", 28) < c.L
                                        : std::count(types.begin(), types.end(), "sliding_attention") > 0;
    if (f.boolean("use_sliding_window", false) && slides) c.window = f.natural("sliding_window", 4096);
    return c;
}

// GPT-2 has sizes of other names, and defaults of transformers' GPT2Config.
ModelConfig read_gpt2(const Fields& f) {
    require_implemented(f, GPT2_IMPLEMENTED);
    ModelConfig c{};
    c.L = f.natural("n_layer");
    c.C = f.natural("n_embd");
    c.NH = c.NKV = f.natural("n_head");
    if (c.C > 1 << 14) f.reject("n_embd", "is larger than this program supports (2^14); give another model");
    c.F = f.natural("n_inner", 4 * c.C);
    c.V = f.natural("vocab_size");
    c.max_T = f.natural("n_positions", 1024);
    c.tied = f.boolean("tie_word_embeddings", true);
    c.norm_eps = f.positive("layer_norm_epsilon", 1e-5f);
    return c;
}

ordered_json gpt2_json(const ModelConfig& c) {
    return {{"n_embd", c.C}, {"n_inner", c.F}, {"n_layer", c.L}, {"n_head", c.NH}, {"vocab_size", c.V},
            {"n_positions", c.max_T}, {"activation_function", "gelu_new"},
            {"layer_norm_epsilon", shortest(c.norm_eps)}, {"resid_pdrop", 0.0}, {"embd_pdrop", 0.0},
            {"attn_pdrop", 0.0}, {"scale_attn_weights", true}};
}

// How config.json describes an architecture.
struct ConfigFormat : Architecture {
    const char* causal_lm;                      // the class in transformers
    ModelConfig (*read)(const Fields&);         // all but name and architecture
    ordered_json (*write)(const ModelConfig&);  // without the fields that all architectures have
};
const std::vector<ConfigFormat> CONFIG_FORMATS = {
    {LLAMA, "LlamaForCausalLM", read_llama, llama_json},
    {MISTRAL, "MistralForCausalLM", read_mistral, llama_json},
    {QWEN2, "Qwen2ForCausalLM", read_qwen2, llama_json},
    {GPT2, "GPT2LMHeadModel", read_gpt2, gpt2_json},
};

ordered_json config_json(const ModelConfig& c) {
    const ConfigFormat& f = find_row(CONFIG_FORMATS, c.arch.name, "model_type");
    ordered_json j = {{"architectures", {f.causal_lm}}, {"model_type", c.arch.name}};
    j.update(f.write(c));
    j["tie_word_embeddings"] = c.tied;
    // Without these fields transformers assumes the special tokens of the original Llama or GPT-2.
    j["bos_token_id"] = j["eos_token_id"] = j["pad_token_id"] = nullptr;
    j["torch_dtype"] = "bfloat16";
    return j;
}

// config.json of a model that came with another config.json, or with none (null). The result has our fields,
// then those of the original that have another name.
ordered_json merged_config(const ModelConfig& c, const json& original) {
    ordered_json merged = config_json(c);
    if (original.is_null()) return merged;
    for (const char* token : {"bos_token_id", "eos_token_id", "pad_token_id"})  // this program knows none
        if (original.contains(token)) merged[token] = original[token];
        else merged.erase(token);  // missing and null differ in transformers
    // These stay as the original spells them; what they say is in our ModelConfig.
    for (const char* field : {"rope_scaling", "use_sliding_window", "sliding_window"})
        if (original.contains(field) && !original[field].is_null()) merged[field] = original[field];
    // Other names in transformers for torch_dtype and for the sizes of GPT-2. They could contradict ours.
    const std::set<std::string> aliases = {"dtype", "hidden_size", "num_hidden_layers",
                                           "num_attention_heads", "max_position_embeddings"};
    for (const auto& [field, value] : original.items())
        if (!merged.contains(field) && !aliases.count(field)) merged[field] = value;
    return merged;
}

// -----------------------------------------------------------------------------------------------------------
// Companions: files that this program passes on from folder to folder and does not interpret.

constexpr int64_t COMPANIONS_MIB = 256;  // several times the size of the largest tokenizers
const std::vector<std::string> COMPANION_FILES = {
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json",     "merges.txt",            "tokenizer.model",         "chat_template.jinja",
    "chat_template.json", "generation_config.json"};

// -----------------------------------------------------------------------------------------------------------
// Weights. A value passes through as the bits of an FP32 number, which weight and remainder are cut from
// (reference.h, split_master). No arithmetic changes it.

// F16 has 5 bits of exponent with bias 15, and 10 of mantissa; FP32 has 8 with bias 127, and 23.
uint32_t f32_of_f16(uint16_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 0x1F, mantissa = half & 0x3FF;
    if (exponent == 0x1F) return sign | 0x7F800000 | mantissa << 13;  // infinity and NaN
    if (exponent) return sign | (exponent + 112) << 23 | mantissa << 13;
    const float subnormal = float(mantissa) * 0x1p-24f;  // exact
    uint32_t bits;
    std::memcpy(&bits, &subnormal, sizeof bits);
    return sign | bits;
}

const std::map<std::string, Format> SOURCE_FORMATS = {
    {"BF16", Format::BF16}, {"F16", Format::F16}, {"F32", Format::F32}};

// Element i of a tensor in a file, at any alignment.
uint32_t f32_bits(Format format, const uint8_t* data, int64_t i) {
    uint32_t bits = 0;
    if (format == Format::F32) std::memcpy(&bits, data + 4 * i, 4);
    else std::memcpy(&bits, data + 2 * i, 2);  // the lower half: files and machine are little-endian
    return format == Format::F32 ? bits : format == Format::BF16 ? bits << 16 : f32_of_f16(bits);
}

// The weight files of a folder: one, or the shards that the index lists. Large models come in shards of some
// GB each, and a tensor is in exactly one of them.
struct WeightFiles {
    std::string folder;
    std::map<std::string, Safetensors> files;           // by name
    std::map<std::string, const Safetensors*> file_of;  // by the name of the tensor
};

WeightFiles open_weights(const std::string& folder) {
    WeightFiles weights{folder, {}, {}};
    const std::string one = path_in(folder, WEIGHTS_FILE), index = one + ".index.json";
    auto require = [&](bool ok, const auto&... what) {
        if (!ok) throw Error(index, " ", what..., "; download the folder again.");
    };
    json map = json::object();  // from a tensor to its file
    if (fs::exists(one)) weights.files.try_emplace(WEIGHTS_FILE, one);
    else if (fs::exists(index)) map = read_json(index).inner("weight_map").object;
    else throw Error(folder, " has no ", WEIGHTS_FILE, "; give a folder with it.");
    require(!map.empty() || !weights.files.empty(), "has no weight_map");
    for (const auto& [tensor, shard] : map.items()) {
        require(shard.is_string(), "names no file for tensor ", escaped(tensor));
        const std::string name = shard.get<std::string>();
        require(!name.empty() && name.find('/') == std::string::npos,
                "names ", escaped(name), ", which is not a file in the folder");
        weights.files.try_emplace(name, path_in(folder, name));
    }
    for (const auto& [name, file] : weights.files)
        for (const Tensor& tensor : file.tensors())
            if (!weights.file_of.emplace(tensor.name, &file).second)
                throw Error(file.path(), " has tensor ", escaped(tensor.name),
                            ", which another shard also has; download the folder again.");
    for (const auto& [tensor, shard] : map.items())
        require(weights.file_of.count(tensor), "says that ", Fields::excerpt(shard), " has tensor ",
                escaped(tensor), ", but no file has it");
    return weights;
}

// A piece, and the bytes of a file that fill it.
struct Source {
    Piece piece;
    Format format;
    const uint8_t* data;
    std::string path;
};

// The sources of all parameters, in the order of the parameters. A tensor that no piece asks for is an error:
// it means another architecture than config.json says, such as one with biases.
std::vector<Source> find_sources(const WeightFiles& files, const ModelConfig& c) {
    const std::string& prefix = family(c).prefix;
    std::vector<Source> sources;
    std::set<std::string> known;
    if (c.tied) known.insert("lm_head.weight");  // some files repeat the embedding under this name
    for (const Piece& piece : pieces(c)) {
        std::string name = piece.theirs;
        if (!files.file_of.count(name) && name.rfind(prefix, 0) == 0) name.erase(0, prefix.size());
        const auto found = files.file_of.find(name);
        if (found == files.file_of.end())
            throw Error(files.folder, " has no tensor ", piece.theirs,
                        ", but its config.json needs it; download the folder again.");
        const Safetensors& file = *found->second;
        const std::string dtype = file.find(name)->dtype;
        const auto format = SOURCE_FORMATS.find(dtype);
        if (format == SOURCE_FORMATS.end())
            throw Error(file.path(), " has tensor ", name, " as ", dtype,
                        "; give weights in BF16, F16 or F32.");
        const uint8_t* data = file.require(name, dtype, piece.shape()).data;
        sources.push_back({piece, format->second, data, file.path()});
        known.insert(name);
    }
    for (const auto& [name, file] : files.file_of) {
        for (const std::string& end : family(c).ignored)
            if (ends_with(name, end)) known.insert(name);
        if (!known.count(name))
            throw Error(file->path(), " has tensor ", escaped(name),
                        ", which this program does not implement; give another model.");
    }
    return sources;
}

// Writes one parameter from its sources: weight = upper 16 bits of (FP32 bits + 0x8000), remainder = lower 16
// bits. NaN, infinity and what rounds to infinity are errors: the NaN 0x7FFFFFFF would become the weight -0.
void write_parameter(Model& model, const Param& p, const std::vector<Source>& sources) {
    constexpr uint32_t EXPONENT = 0x7F800000;
    std::vector<uint16_t> weight(p.size());  // rows that pad the vocabulary stay zero
    std::vector<int16_t> remainder(p.size());
    for (const Source& s : sources) {
        if (s.piece.param.name != p.name) continue;
        int64_t bad = 0;
#pragma omp parallel for reduction(+ : bad)
        for (int64_t i = 0; i < s.piece.size(); i++) {
            const uint32_t bits = f32_bits(s.format, s.data, i), rounded = bits + 0x8000;
            const int64_t at = s.piece.index_in_param(i);
            weight[at] = uint16_t(rounded >> 16);
            remainder[at] = int16_t(bits & 0xFFFF);
            bad += (bits & EXPONENT) == EXPONENT || (rounded & EXPONENT) == EXPONENT;
        }
        if (bad)
            throw Error(s.path, " has NaN, infinity or values beyond BF16 in tensor ", s.piece.theirs,
                        "; give other weights.");
    }
    const Setup& setup = model.setup();
    model.write(p.name, weight.data() + kept_weight(setup, p).first);
    if (setup.master) model.write(p.name + ".remainder", remainder.data() + owned(setup, p).first);
}

}  // namespace

ModelConfig read_model_config(const std::string& folder) {
    std::error_code ignored;  // also a link to itself is no folder
    if (!fs::is_directory(folder, ignored))
        throw Error(folder, " is not a folder; give a Hugging Face model folder.");
    const Fields f = read_json(path_in(folder, CONFIG_FILE));
    std::vector<json> types;
    for (const ConfigFormat& row : CONFIG_FORMATS) types.push_back(row.name);
    require_implemented(f, {{"model_type", types}});
    const ConfigFormat& format = find_row(CONFIG_FORMATS, f.text("model_type"), "model_type");
    ModelConfig c = format.read(f);
    c.arch = format;
    c.name = folder;
    validate(c);
    return c;
}

void check_weights(const std::string& folder, const ModelConfig& config) {
    find_sources(open_weights(folder), config);
}

void load_weights(const std::string& folder, Model& model) {
    const WeightFiles files = open_weights(folder);
    const ModelConfig& c = model.setup().config;
    const std::vector<Source> sources = find_sources(files, c);
    for (const Param& p : parameters(c)) write_parameter(model, p, sources);
}

Companions read_companions(const std::string& folder) {
    Companions companions;
    companions.config = read_json(path_in(folder, CONFIG_FILE)).object;
    int64_t left = COMPANIONS_MIB << 20;
    for (const std::string& name : COMPANION_FILES) {
        const std::string path = path_in(folder, name);
        if (!has_entry(path)) continue;  // opening a link that leads nowhere is an Error
        const InputFile file(path);
        if (file.bytes() > left)
            throw Error(folder, " has more than ", COMPANIONS_MIB, " MiB in its tokenizer files, the last of "
                        "them ", name, "; remove what is not the tokenizer's, or give another folder.");
        std::string& bytes = companions.files[name];
        bytes.resize(file.bytes());
        file.read(0, bytes.data(), file.bytes());
        left -= file.bytes();
    }
    return companions;
}

void save_model_folder(const std::string& folder, Model& model, const Companions& companions) {
    const ModelConfig& c = model.setup().config;
    write_json(path_in(folder, CONFIG_FILE), merged_config(c, companions.config));
    for (const auto& [name, bytes] : companions.files) write_file(path_in(folder, name), bytes);
    const std::vector<Piece> table = pieces(c);
    std::vector<TensorInfo> tensors;
    for (const Piece& piece : table) tensors.push_back({piece.theirs, "BF16", piece.shape()});
    SafetensorsWriter file(path_in(folder, WEIGHTS_FILE), tensors);
    for (const StateTensor& t : weight_tensors(c)) {
        const Bytes bytes = whole_tensor(model, t);
        const auto* whole = reinterpret_cast<const uint16_t*>(bytes.data());  // from new: aligned
        for (const Piece& piece : table) {
            if (piece.param.name != t.name) continue;
            std::vector<uint16_t> part(piece.size());
            for (int64_t i = 0; i < piece.size(); i++) part[i] = whole[piece.index_in_param(i)];
            file.write(part.data(), piece.size() * 2);
        }
    }
    file.finish();
}

// Every rank sends its part to rank 0, unless rank 0 has the whole.
Bytes whole_tensor(Model& model, const StateTensor& t) {
    const Setup& setup = model.setup();
    Setup first = setup;
    first.rank = 0;
    const bool sharded = kept(first, t).count < t.size();
    Bytes mine(setup.rank == 0 || sharded ? kept(setup, t).count * t.bytes : 0);
    if (!mine.empty()) model.read(t.name, mine.data());
    if (!sharded) return mine;
    std::vector<Bytes> parts(setup.ranks);
    parts[0] = std::move(mine);
    Bytes whole;  // in the order of the ranks; elsewhere all parts are empty
    whole.reserve(setup.rank ? 0 : t.total_bytes());
    for (const Bytes& part : setup.processes->exchange(std::move(parts)))
        whole.insert(whole.end(), part.begin(), part.end());
    return whole;
}

// Compares what config.json would say, so that a field counts only if it is part of the shape.
void require_same_config(const std::string& folder, const ModelConfig& config) {
    const ordered_json theirs = config_json(read_model_config(folder)), ours = config_json(config);
    for (const auto& [field, value] : ours.items())
        if (theirs.value(field, ordered_json()) != value)
            throw Error(folder, " is a checkpoint of another model (", field, " is ",
                        theirs.value(field, ordered_json()).dump(), ", not ", value.dump(),
                        "); resume with the --model that wrote it.");
}

}  // namespace coat

// data/checkpoint.cpp - model folders and checkpoints (checkpoint.h).
//
// Two tables carry this file: what each of our parameters is called in a Hugging Face folder (ours are fused), and which
// field of config.json says what. The rest reads and writes by those tables.
#include "checkpoint.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <functional>
#include <limits>
#include <set>

#include "../plan.h"
#include "json.h"
#include "safetensors.h"

namespace coat {
namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

namespace {

constexpr int CHECKPOINT_VERSION = 1;
constexpr uint64_t MOST = 1'000'000'000'000'000;  // no size or count in a JSON file is larger, so that none overflows when it grows
const std::string CONFIG = "config.json", WEIGHTS = "model.safetensors", INDEX = "model.safetensors.index.json",
                  OPTIMIZER = "optimizer.safetensors", TRAINER = "trainer.json";

std::string join(const std::string& folder, const std::string& file) { return (fs::path(folder) / file).string(); }

// ---------------------------------------------------------------------------------------------------------------------
// Names: which rows of which of our parameters a Hugging Face tensor holds. '#' is the layer.

struct Rows {
    int64_t first, count;
};
using Part = Rows (*)(const ModelConfig&, const Param&);

Rows all(const ModelConfig&, const Param& p) { return {0, p.rows}; }
Rows live(const ModelConfig& c, const Param&) { return {0, c.V}; }  // the files know nothing of the padded vocabulary
Rows q(const ModelConfig& c, const Param&) { return {0, c.q_cols()}; }
Rows k(const ModelConfig& c, const Param&) { return {c.q_cols(), c.kv_cols()}; }
Rows v(const ModelConfig& c, const Param&) { return {c.q_cols() + c.kv_cols(), c.kv_cols()}; }
Rows gate(const ModelConfig& c, const Param&) { return {0, c.F}; }
Rows up(const ModelConfig& c, const Param&) { return {c.F, c.F}; }

struct Name {
    const char *ours, *theirs;
    Part part;
    bool transposed;  // GPT-2's Conv1D keeps (in, out)
};

const std::vector<Name> LLAMA_NAMES = {
    {"embedding", "model.embed_tokens.weight", live, false},
    {"layers.#.norm1.weight", "model.layers.#.input_layernorm.weight", all, false},
    {"layers.#.qkv", "model.layers.#.self_attn.q_proj.weight", q, false},
    {"layers.#.qkv", "model.layers.#.self_attn.k_proj.weight", k, false},
    {"layers.#.qkv", "model.layers.#.self_attn.v_proj.weight", v, false},
    {"layers.#.attention_out", "model.layers.#.self_attn.o_proj.weight", all, false},
    {"layers.#.norm2.weight", "model.layers.#.post_attention_layernorm.weight", all, false},
    {"layers.#.gate_up", "model.layers.#.mlp.gate_proj.weight", gate, false},
    {"layers.#.gate_up", "model.layers.#.mlp.up_proj.weight", up, false},
    {"layers.#.down", "model.layers.#.mlp.down_proj.weight", all, false},
    {"final_norm.weight", "model.norm.weight", all, false},
    {"head", "lm_head.weight", live, false},
};

const std::vector<Name> GPT2_NAMES = {
    {"embedding", "transformer.wte.weight", live, false},
    {"positions", "transformer.wpe.weight", all, false},
    {"layers.#.norm1.weight", "transformer.h.#.ln_1.weight", all, false},
    {"layers.#.norm1.bias", "transformer.h.#.ln_1.bias", all, false},
    {"layers.#.qkv", "transformer.h.#.attn.c_attn.weight", all, true},
    {"layers.#.qkv.bias", "transformer.h.#.attn.c_attn.bias", all, false},
    {"layers.#.attention_out", "transformer.h.#.attn.c_proj.weight", all, true},
    {"layers.#.attention_out.bias", "transformer.h.#.attn.c_proj.bias", all, false},
    {"layers.#.norm2.weight", "transformer.h.#.ln_2.weight", all, false},
    {"layers.#.norm2.bias", "transformer.h.#.ln_2.bias", all, false},
    {"layers.#.gate_up", "transformer.h.#.mlp.c_fc.weight", all, true},
    {"layers.#.gate_up.bias", "transformer.h.#.mlp.c_fc.bias", all, false},
    {"layers.#.down", "transformer.h.#.mlp.c_proj.weight", all, true},
    {"layers.#.down.bias", "transformer.h.#.mlp.c_proj.bias", all, false},
    {"final_norm.weight", "transformer.ln_f.weight", all, false},
    {"final_norm.bias", "transformer.ln_f.bias", all, false},
    {"head", "lm_head.weight", live, false},
};

struct Family {
    Architecture arch;
    const std::vector<Name>& names;
    const char* prefix;                 // which files of the bare model leave out
    std::vector<const char*> ignored;   // ends of names of buffers that hold nothing learned
};
const Family FAMILIES[] = {
    {LLAMA, LLAMA_NAMES, "model.", {".rotary_emb.inv_freq"}},
    {GPT2, GPT2_NAMES, "transformer.", {".attn.bias", ".attn.masked_bias"}},
};

const Family& family(const Architecture& arch) {
    return *std::find_if(std::begin(FAMILIES), std::end(FAMILIES), [&](const Family& f) { return f.arch.name == std::string(arch.name); });
}

// One tensor of a Hugging Face file as a place in one of our parameters.
struct Piece {
    std::string theirs;
    Param param;
    Rows rows;
    bool transposed;

    std::vector<int64_t> shape() const {
        if (param.rows == 1) return {param.cols};
        return transposed ? std::vector<int64_t>{param.cols, rows.count} : std::vector<int64_t>{rows.count, param.cols};
    }
    int64_t size() const { return rows.count * param.cols; }
    // Where element i of the file's tensor lies in the whole parameter.
    int64_t place(int64_t i) const {
        if (!transposed) return rows.first * param.cols + i;
        return (rows.first + i % rows.count) * param.cols + i / rows.count;
    }
};

// The pieces of a model in the order of its parameters.
std::vector<Piece> pieces(const ModelConfig& c) {
    std::vector<Piece> result;
    for (const Param& p : parameters(c)) {
        std::string ours = p.name, layer;
        if (ours.rfind("layers.", 0) == 0) {
            const size_t begin = 7, end = ours.find('.', begin);
            layer = ours.substr(begin, end - begin);
            ours.replace(begin, end - begin, "#");
        }
        for (const Name& name : family(c.arch).names) {
            if (name.ours != ours) continue;
            std::string theirs = name.theirs;
            if (!layer.empty()) theirs.replace(theirs.find('#'), 1, layer);
            result.push_back({theirs, p, name.part(c, p), name.transposed});
        }
    }
    return result;
}

// ---------------------------------------------------------------------------------------------------------------------
// JSON files

json read_json(const std::string& path) {
    const MappedFile file = map_file(path);
    std::string why;
    json value = parse_json(file.data(), file.bytes, &why);
    if (!why.empty()) throw Error(path + " " + why + "; download or save it again.");
    return value;
}

void write_json(const std::string& path, const ordered_json& value) {
    const std::string text = value.dump(2) + "\n";
    OutputFile file(path);
    file.write(text.data(), static_cast<int64_t>(text.size()));
    file.finish();
}

using coat::shown;
std::string shown(const json& value) { return shown(value.dump()); }

// The fields of one JSON file, checked. A field that is null counts as absent, as in Hugging Face's configurations.
struct Fields {
    std::string path;
    json object;

    [[noreturn]] void refuse(const std::string& field, const std::string& what) const {
        throw Error(path + ": field " + field + " " + what + ".");
    }
    bool has(const std::string& field) const { return object.contains(field) && !object[field].is_null(); }
    int64_t natural(const std::string& field) const {
        if (!has(field)) refuse(field, "is missing; download or save the folder again");
        const json& value = object[field];
        if (!value.is_number_unsigned() || value.get<uint64_t>() > MOST)
            refuse(field, "must be a whole number up to 10^15, not " + shown(value));
        return value.get<int64_t>();
    }
    int64_t natural(const std::string& field, int64_t otherwise) const { return has(field) ? natural(field) : otherwise; }
    float positive(const std::string& field, float otherwise) const {
        if (!has(field)) return otherwise;
        const json& value = object[field];
        const float number = value.is_number() ? value.get<float>() : 0;
        if (!(number > 0 && std::isfinite(number))) refuse(field, "must be a positive number, not " + shown(value));
        return number;
    }
    std::vector<double> not_negatives(const std::string& field) const {
        std::vector<double> numbers;
        for (const json& value : object.value(field, json::array())) {
            numbers.push_back(value.is_number() ? value.get<double>() : -1);
            if (!(numbers.back() >= 0 && std::isfinite(numbers.back()))) refuse(field, "must be numbers of at least 0, not " + shown(value));
        }
        return numbers;
    }
    bool flag(const std::string& field, bool otherwise) const {
        if (!has(field)) return otherwise;
        if (!object[field].is_boolean()) refuse(field, "must be true or false, not " + shown(object[field]));
        return object[field].get<bool>();
    }
    std::string text(const std::string& field) const {
        if (!has(field) || !object[field].is_string()) refuse(field, "is missing or not text; download or save the folder again");
        return object[field].get<std::string>();
    }
    Fields inner(const std::string& field) const {
        if (!has(field)) return {path, json::object()};
        if (!object[field].is_object()) refuse(field, "must be an object, not " + shown(object[field]));
        return {path, object[field]};
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// config.json

// What changes the arithmetic of a model, and the values that this program implements; absent is fine too.
struct Implemented {
    const char* field;
    std::vector<json> values;
};
const std::vector<Implemented> LLAMA_IMPLEMENTED = {
    {"hidden_act", {"silu", "swish"}}, {"attention_bias", {false}}, {"mlp_bias", {false}}, {"partial_rotary_factor", {1.0}}, {"quantization_config", {}},
};
const std::vector<Implemented> GPT2_IMPLEMENTED = {
    {"activation_function", {"gelu_new", "gelu_pytorch_tanh"}},
    {"scale_attn_weights", {true}},
    {"scale_attn_by_inverse_layer_idx", {false}},
    {"add_cross_attention", {false}},
    {"quantization_config", {}},
};
const std::vector<Implemented> ROPE_IMPLEMENTED = {{"rope_type", {"default"}}, {"type", {"default"}}, {"partial_rotary_factor", {1.0}}};

void need_implemented(const Fields& f, const std::vector<Implemented>& table) {
    for (const auto& [field, values] : table) {
        if (!f.has(field) || std::count(values.begin(), values.end(), f.object[field])) continue;
        f.refuse(field, "is " + shown(f.object[field]) + ", which this program does not implement" +
                            (values.empty() ? "" : " (it has " + values[0].dump() + ")") + "; start from another model");
    }
}

ModelConfig read_llama(const Fields& f) {
    need_implemented(f, LLAMA_IMPLEMENTED);
    for (const char* rope : {"rope_scaling", "rope_parameters"}) need_implemented(f.inner(rope), ROPE_IMPLEMENTED);
    ModelConfig c{};
    c.arch = LLAMA;
    c.L = f.natural("num_hidden_layers");
    c.C = f.natural("hidden_size");
    c.NH = f.natural("num_attention_heads");
    c.NKV = f.natural("num_key_value_heads", c.NH);
    c.F = f.natural("intermediate_size");
    c.V = f.natural("vocab_size");
    c.max_T = f.natural("max_position_embeddings", 2048);
    c.tied = f.flag("tie_word_embeddings", false);
    c.norm_eps = f.positive("rms_norm_eps", 1e-6f);
    c.rope_theta = f.inner("rope_parameters").positive("rope_theta", f.positive("rope_theta", 10000.0f));  // transformers 5, and before
    c.head_size = f.natural("head_dim", 0);
    return c;
}

ModelConfig read_gpt2(const Fields& f) {
    need_implemented(f, GPT2_IMPLEMENTED);
    if (!f.has("activation_function") && f.has("hidden_act")) f.refuse("hidden_act", "belongs to another architecture; start from another model");
    ModelConfig c{};
    c.arch = GPT2;
    c.L = f.natural("n_layer");
    c.C = f.natural("n_embd");
    c.NH = c.NKV = f.natural("n_head");
    if (c.C > 1 << 20) f.refuse("n_embd", "is larger than this program supports (2^20); start from another model");
    c.F = f.natural("n_inner", 4 * c.C);
    c.V = f.natural("vocab_size");
    c.max_T = f.natural("n_positions", 1024);
    c.tied = f.flag("tie_word_embeddings", true);
    c.norm_eps = f.positive("layer_norm_epsilon", 1e-5f);
    return c;
}

// The shortest decimal that is this float, so that files say 1e-05 and not 9.999999747378752e-06.
double shortest(float x) {
    char text[32];
    *std::to_chars(text, text + sizeof text - 1, x).ptr = '\0';
    return std::strtod(text, nullptr);
}

ordered_json llama_json(const ModelConfig& c) {
    return {{"architectures", {"LlamaForCausalLM"}}, {"model_type", c.arch.name}, {"hidden_size", c.C}, {"intermediate_size", c.F},
            {"num_hidden_layers", c.L}, {"num_attention_heads", c.NH}, {"num_key_value_heads", c.NKV}, {"head_dim", c.HS()},
            {"vocab_size", c.V}, {"max_position_embeddings", c.max_T}, {"hidden_act", "silu"}, {"rms_norm_eps", shortest(c.norm_eps)},
            {"rope_theta", shortest(c.rope_theta)}, {"rope_scaling", nullptr}, {"attention_bias", false}, {"mlp_bias", false},
            {"tie_word_embeddings", c.tied}};
}

ordered_json gpt2_json(const ModelConfig& c) {
    return {{"architectures", {"GPT2LMHeadModel"}}, {"model_type", c.arch.name}, {"n_embd", c.C}, {"n_inner", c.F}, {"n_layer", c.L},
            {"n_head", c.NH}, {"vocab_size", c.V}, {"n_positions", c.max_T}, {"activation_function", "gelu_new"},
            {"layer_norm_epsilon", shortest(c.norm_eps)}, {"resid_pdrop", 0.0}, {"embd_pdrop", 0.0}, {"attn_pdrop", 0.0},
            {"scale_attn_weights", true}, {"tie_word_embeddings", c.tied}};
}

ordered_json config_json(const ModelConfig& c) {
    ordered_json j = c.arch.rope ? llama_json(c) : gpt2_json(c);
    j["bos_token_id"] = j["eos_token_id"] = j["pad_token_id"] = nullptr;  // else transformers assumes Llama's or GPT-2's own
    j["torch_dtype"] = "bfloat16";
    return j;
}

// ---------------------------------------------------------------------------------------------------------------------
// Weights. Values travel as the bits of an FP32 number, which is what weight and remainder are cut from (reference.h,
// split_master): no arithmetic touches them.

uint32_t f32_of_f16(uint16_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 0x1F, mantissa = half & 0x3FF;
    if (exponent == 0x1F) return sign | 0x7F800000 | mantissa << 13;  // infinity and NaN
    if (exponent) return sign | (exponent + 112) << 23 | mantissa << 13;
    const float subnormal = static_cast<float>(mantissa) * 0x1p-24f;  // exact
    uint32_t bits;
    std::memcpy(&bits, &subnormal, sizeof bits);
    return sign | bits;
}

template <class T>
T load(const uint8_t* data, int64_t i) {  // of any alignment
    T value;
    std::memcpy(&value, data + i * static_cast<int64_t>(sizeof value), sizeof value);
    return value;
}

struct SourceFormat {
    const char* dtype;
    uint32_t (*bits)(const uint8_t* data, int64_t i);  // of element i as FP32
};
constexpr SourceFormat SOURCE_FORMATS[] = {
    {"BF16", [](const uint8_t* data, int64_t i) { return uint32_t{load<uint16_t>(data, i)} << 16; }},
    {"F16", [](const uint8_t* data, int64_t i) { return f32_of_f16(load<uint16_t>(data, i)); }},
    {"F32", [](const uint8_t* data, int64_t i) { return load<uint32_t>(data, i); }},
};

// The tensor of that name; Error unless it is there with this dtype and shape.
const Tensor& expect(const Safetensors& file, const std::string& name, const std::string& dtype, const std::vector<int64_t>& shape) {
    const Tensor* t = file.find(name);
    if (!t) throw Error(file.path() + " has no tensor " + name + "; it is of another model or version.");
    if (t->dtype != dtype || t->shape != shape)
        throw Error(file.path() + " has tensor " + name + " as " + t->dtype + " " + shown(shape_text(t->shape)) + " where " + dtype + " " + shape_text(shape) +
                    " is needed; it is of another model or version.");
    return *t;
}

// The tensors of a model folder, in one file or in shards.
class WeightFiles {
public:
    explicit WeightFiles(const std::string& folder) : folder_(folder) {
        if (fs::exists(join(folder, WEIGHTS))) add(WEIGHTS);
        else if (fs::exists(join(folder, INDEX))) add_shards();
        else throw Error(folder + " has neither " + WEIGHTS + " nor " + INDEX + "; give a Hugging Face folder with safetensors.");
    }

    // The tensor's file, and its name there, which may lack the prefix; null if it is nowhere.
    const Safetensors* find(const std::string& name, const std::string& prefix, std::string* found) const {
        const bool prefixed = name.rfind(prefix, 0) == 0;
        for (const std::string& candidate : {name, prefixed ? name.substr(prefix.size()) : name}) {
            const auto file = files_of_.find(candidate);
            if (file == files_of_.end()) continue;
            *found = candidate;
            return file->second;
        }
        return nullptr;
    }
    const std::map<std::string, const Safetensors*>& names() const { return files_of_; }
    const std::string& folder() const { return folder_; }

private:
    void add(const std::string& file) {
        files_.push_back(std::make_unique<Safetensors>(join(folder_, file)));
        for (const Tensor& tensor : files_.back()->tensors())
            if (!files_of_.emplace(tensor.name, files_.back().get()).second)
                throw Error(join(folder_, file) + " has tensor " + shown(tensor.name) + ", which another shard has too; download the folder again.");
    }

    void add_shards() {
        const std::string path = join(folder_, INDEX);
        const json map = read_json(path).value("weight_map", json());
        auto require = [&](bool ok, const std::string& what) {
            if (!ok) throw Error(path + " " + what + "; download the folder again.");
        };
        require(map.is_object() && !map.empty(), "has no weight_map");
        std::set<std::string> shards;
        for (const auto& [name, file] : map.items()) {
            require(file.is_string(), "names no file for tensor " + shown(name));
            shards.insert(file.get<std::string>());
        }
        for (const std::string& shard : shards) {
            require(!shard.empty() && shard.find('/') == std::string::npos, "names " + shown(shard) + ", which is not a file in the folder");
            add(shard);
        }
        for (const auto& [name, file] : map.items())
            require(files_of_.count(name), "says that " + shown(file) + " has tensor " + shown(name) + ", and it has not");
    }

    std::string folder_;
    std::vector<std::unique_ptr<Safetensors>> files_;
    std::map<std::string, const Safetensors*> files_of_;
};

// A piece and the checked bytes that fill it.
struct Source {
    Piece piece;
    const SourceFormat* format;
    const uint8_t* data;
    std::string path;
};

Source source(const WeightFiles& files, const Piece& piece, const std::string& prefix) {
    std::string name;
    const Safetensors* file = files.find(piece.theirs, prefix, &name);
    if (!file) throw Error(files.folder() + " has no tensor " + piece.theirs + ", which its config.json asks for; download the folder again.");
    const std::string dtype = file->find(name)->dtype;
    const auto format = std::find_if(std::begin(SOURCE_FORMATS), std::end(SOURCE_FORMATS), [&](const SourceFormat& f) { return dtype == f.dtype; });
    if (format == std::end(SOURCE_FORMATS))
        throw Error(file->path() + " has tensor " + name + " as " + dtype + "; give a folder with weights in BF16, F16 or F32.");
    return {piece, format, expect(*file, name, dtype, piece.shape()).data, file->path()};
}

// A tensor that nothing here asks for means an architecture that is not what config.json says: biases, another block.
void need_nothing_else(const WeightFiles& files, const ModelConfig& c, const Family& family, const std::vector<Piece>& known) {
    std::set<std::string> names;
    for (const Piece& piece : known) {
        std::string name;
        if (files.find(piece.theirs, family.prefix, &name)) names.insert(name);
    }
    if (c.tied) names.insert("lm_head.weight");  // some files repeat the embedding under this name
    for (const auto& [name, file] : files.names()) {
        const std::string& n = name;
        const bool ignored = std::any_of(family.ignored.begin(), family.ignored.end(), [&](const char* end) { return ends_with(n, end); });
        if (!ignored && !names.count(name))
            throw Error(file->path() + " has tensor " + shown(name) + ", which this program does not implement; start from another model.");
    }
}

// The sources of all parameters, in the order of the parameters.
std::vector<Source> sources_of(const WeightFiles& files, const ModelConfig& c) {
    const Family& f = family(c.arch);
    const std::vector<Piece> table = pieces(c);
    need_nothing_else(files, c, f, table);
    std::vector<Source> sources;
    for (const Piece& piece : table) sources.push_back(source(files, piece, f.prefix));
    return sources;
}

// A parameter's BF16 weights and remainders from all the pieces that make it. A NaN must not pass: rounded, 0x7FFFFFFF, which is
// NVIDIA's, would be the weight -0.
void write_parameter(Model& model, const Param& p, const Source* begin, const Source* end) {
    constexpr uint32_t EXPONENT = 0x7F800000;
    std::vector<uint16_t> weight(static_cast<size_t>(p.size()));  // rows of the vocabulary's padding stay zero
    std::vector<int16_t> remainder(static_cast<size_t>(p.size()));
    for (const Source* source = begin; source != end; source++) {
        const Source& s = *source;
        int64_t bad = 0;
#pragma omp parallel for reduction(+ : bad)
        for (int64_t i = 0; i < s.piece.size(); i++) {
            const uint32_t bits = s.format->bits(s.data, i), rounded = bits + 0x8000;
            const auto at = static_cast<size_t>(s.piece.place(i));
            weight[at] = static_cast<uint16_t>(rounded >> 16);
            remainder[at] = static_cast<int16_t>(bits & 0xFFFF);
            bad += (bits & EXPONENT) == EXPONENT || (rounded & EXPONENT) == EXPONENT;
        }
        if (bad) throw Error(s.path + " has NaN, infinity or numbers beyond BF16 in tensor " + s.piece.theirs + "; start from other weights.");
    }
    model.write(p.name, weight.data());
    if (model.setup().master) model.write(p.name + ".remainder", remainder.data());
}

void save_weights(const std::string& path, Model& model) {
    const ModelConfig& c = model.setup().config;
    const std::vector<Piece> table = pieces(c);
    std::vector<TensorInfo> tensors;
    for (const Piece& piece : table) tensors.push_back({piece.theirs, "BF16", piece.shape()});
    SafetensorsWriter file(path, tensors, {{"format", "pt"}});  // transformers insists on this word

    std::string held;
    std::vector<uint16_t> whole, part;
    for (const Piece& piece : table) {
        if (held != piece.param.name) {
            held = piece.param.name;
            whole.resize(static_cast<size_t>(piece.param.size()));
            model.read(held, whole.data());
        }
        part.resize(static_cast<size_t>(piece.size()));
        for (int64_t i = 0; i < piece.size(); i++) part[static_cast<size_t>(i)] = whole[static_cast<size_t>(piece.place(i))];
        file.write(part.data(), piece.size() * 2);
    }
    file.finish();
}

// ---------------------------------------------------------------------------------------------------------------------
// optimizer.safetensors and trainer.json

using Metadata = std::map<std::string, std::string>;

Metadata run_metadata(const Setup& s) {
    Metadata metadata = {{"coat_version", std::to_string(CHECKPOINT_VERSION)}, {"recipe", s.recipe.name},        {"optimizer", s.optimizer.name},
                         {"m_format", info(s.optimizer.m).name},               {"v_format", info(s.optimizer.v).name}};
    for (const MemoryMode& mode : memory_modes())
        if (mode.changes_numbers) metadata[mode.flag] = mode.chosen(s);
    return metadata;
}

void save_optimizer(const std::string& path, Model& model) {
    std::vector<StateTensor> table = optimizer_tensors(model.setup());
    // Larger elements first: then every tensor lies on a multiple of its element, which PyTorch's reader needs.
    std::stable_sort(table.begin(), table.end(), [](const StateTensor& a, const StateTensor& b) { return a.bytes > b.bytes; });
    std::vector<TensorInfo> tensors;
    for (const StateTensor& t : table) tensors.push_back({t.name, t.dtype, t.shape});
    SafetensorsWriter file(path, tensors, run_metadata(model.setup()));
    std::vector<uint32_t> buffer;  // of words, so that every dtype is aligned in it
    for (const StateTensor& t : table) {
        buffer.resize(static_cast<size_t>(ceil_div(t.total_bytes(), 4)));
        model.read(t.name, buffer.data());
        file.write(buffer.data(), t.total_bytes());
    }
    file.finish();
}

struct RunField {
    const char *key, *flag;
};
constexpr RunField RUN_FIELDS[] = {{"recipe", "--recipe"},       {"optimizer", "--optimizer"}, {"m_format", "--m-format"}, {"v_format", "--v-format"},
                                   {"attention", "--attention"}, {"master", "--master"},       {"gradients", "--gradients"}};

void need_same_run(const Safetensors& file, const Setup& setup) {
    Metadata theirs = file.metadata(), ours = run_metadata(setup);
    for (const MemoryMode& mode : memory_modes()) theirs.emplace(mode.flag, mode.choices[0].name);  // older files do not say
    if (theirs["coat_version"] != ours["coat_version"])
        throw Error(file.path() + " is of checkpoint version " + (theirs["coat_version"].empty() ? "unknown" : shown(theirs["coat_version"])) +
                    ", this program reads version " + ours["coat_version"] + "; resume it with the program that wrote it.");
    for (const auto& [key, flag] : RUN_FIELDS)
        if (theirs[key] != ours[key])
            throw Error(file.path() + " is of a run with " + flag + " " + shown(theirs[key]) + ", not " + ours[key] + "; resume with " + flag + " " +
                        shown(theirs[key]) + ".");
}

// Numbers that no run leaves behind, and that would spread through all others: NaN and infinity, magnitudes below zero, k outside its bounds.
// (A history of amaxes may hold infinity; it makes no scale of it.)
void need_sound(const Safetensors& file, const StateTensor& t) {
    constexpr struct { const char* dtype; uint32_t sign, infinity; } formats[] = {  // of E4M3, which has none: NaN
        {"F32", 0x80000000u, 0x7F800000u}, {"BF16", 0x8000, 0x7F80}, {"F16", 0x8000, 0x7C00}, {"F8_E4M3", 0x80, 0x7F}, {"F8_E5M2", 0x80, 0x7C}};
    const auto format = std::find_if(std::begin(formats), std::end(formats), [&](const auto& f) { return std::string(f.dtype) == t.dtype; });
    if (format == std::end(formats)) return;  // remainders: any bits will do
    const bool magnitudes = !ends_with(t.name, ".m"), history = ends_with(t.name, ".history"), k = ends_with(t.name, ".k");
    const uint8_t* data = file.find(t.name)->data;
    int64_t bad = 0;
#pragma omp parallel for reduction(+ : bad)
    for (int64_t i = 0; i < t.size(); i++) {
        uint32_t bits = 0;
        std::memcpy(&bits, data + i * t.bytes, static_cast<size_t>(t.bytes));
        float value;
        std::memcpy(&value, &bits, sizeof value);
        bad += (!history && (bits & ~format->sign) >= format->infinity) || (magnitudes && bits > format->sign) ||
               (k && !(value >= 0.0625f && value <= 64));
    }
    if (bad) throw Error(file.path() + " has numbers in " + t.name + " that no run writes; resume from another checkpoint.");
}

struct ShapeField {
    const char* name;
    double (*value)(const ModelConfig&);
};
constexpr ShapeField SHAPE_FIELDS[] = {
    {"layers", [](const ModelConfig& c) -> double { return c.L; }},
    {"hidden size", [](const ModelConfig& c) -> double { return c.C; }},
    {"query heads", [](const ModelConfig& c) -> double { return c.NH; }},
    {"key/value heads", [](const ModelConfig& c) -> double { return c.NKV; }},
    {"head size", [](const ModelConfig& c) -> double { return c.HS(); }},
    {"feed-forward size", [](const ModelConfig& c) -> double { return c.F; }},
    {"vocabulary", [](const ModelConfig& c) -> double { return c.V; }},
    {"positions", [](const ModelConfig& c) -> double { return c.max_T; }},
    {"tied head", [](const ModelConfig& c) -> double { return c.tied; }},
    {"norm epsilon", [](const ModelConfig& c) -> double { return c.norm_eps; }},
    {"RoPE theta", [](const ModelConfig& c) -> double { return c.arch.rope ? c.rope_theta : 0; }},
};

void need_same_shape(const std::string& checkpoint, const ModelConfig& theirs, const ModelConfig& ours) {
    auto differ = [&](const std::string& what, const std::string& a, const std::string& b) {
        throw Error(checkpoint + " is of another model (" + what + " " + a + ", not " + b + "); resume with the --model that wrote it.");
    };
    if (std::string(theirs.arch.name) != ours.arch.name) differ("architecture", theirs.arch.name, ours.arch.name);
    for (const auto& [name, value] : SHAPE_FIELDS)
        if (value(theirs) != value(ours)) differ(name, json(value(theirs)).dump(), json(value(ours)).dump());
}

// A hash of a file's bytes: of each MiB by itself, so that all threads work, then of these hashes. Every step is a
// bijection of the word and of the hash so far, so that a change within one word always changes the result.
uint64_t hash_bytes(const uint8_t* data, int64_t bytes) {
    constexpr int64_t LANES = 4, BLOCK = 8 * LANES;  // four chains at once: a multiplication takes three cycles
    auto step = [](uint64_t hash, uint64_t word) {
        hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
        return hash ^ hash >> 32;
    };
    uint64_t lanes[LANES] = {};
    auto add = [&](const uint8_t* block) {
        for (int64_t i = 0; i < LANES; i++) lanes[i] = step(lanes[i], load<uint64_t>(block, i));
    };
    int64_t at = 0;
    for (; at + BLOCK <= bytes; at += BLOCK) add(data + at);
    uint8_t rest[BLOCK] = {};
    std::copy(data + at, data + bytes, rest);
    add(rest);
    uint64_t hash = static_cast<uint64_t>(bytes);
    for (uint64_t lane : lanes) hash = step(hash, lane);
    return hash;
}

std::string hash_file(const std::string& path) {
    constexpr int64_t PART = 1 << 20;
    const MappedFile file = map_file(path);
    std::vector<uint64_t> parts(static_cast<size_t>(ceil_div(file.bytes, PART)));
#pragma omp parallel for if (parts.size() > 16)
    for (size_t i = 0; i < parts.size(); i++) {
        const int64_t begin = static_cast<int64_t>(i) * PART;
        parts[i] = hash_bytes(file.data() + begin, std::min(PART, file.bytes - begin));
    }
    char text[17];
    const auto* bytes = reinterpret_cast<const uint8_t*>(parts.data());
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash_bytes(bytes, static_cast<int64_t>(parts.size() * 8))));
    return text;
}

// Only older checkpoints are without hashes.
void need_same_bytes(const std::string& checkpoint) {
    const Fields hashes = Fields{join(checkpoint, TRAINER), read_json(join(checkpoint, TRAINER))}.inner("hashes");
    for (const std::string& name : {WEIGHTS, OPTIMIZER})
        if (hashes.has(name) && hashes.text(name) != hash_file(join(checkpoint, name)))
            throw Error(join(checkpoint, name) + " is damaged: its hash is not the one in trainer.json; resume from another checkpoint.");
}

void save_loop_state(const std::string& folder, const LoopState& s, const Setup& setup) {
    ordered_json hashes;
    for (const std::string& name : {WEIGHTS, OPTIMIZER}) hashes[name] = hash_file(join(folder, name));
    write_json(join(folder, TRAINER), {{"format", "coat checkpoint"}, {"version", CHECKPOINT_VERSION}, {"recipe", setup.recipe.name}, {"optimizer", setup.optimizer.name},
                      {"step", s.step}, {"updates", s.updates}, {"epoch", s.position.epoch}, {"window", s.position.window}, {"tokens", s.tokens},
                      {"first_validation", s.first_validation},  // JSON has no NaN: that is null
                      {"norm_correction", s.norm_correction}, {"settings", s.settings}, {"run", s.run}, {"validation", s.validation}, {"hashes", hashes}});
}

// ---------------------------------------------------------------------------------------------------------------------
// Folders: OUT/step-000300, and while it is being replaced OUT/step-000300.old; OUT/step-000300.tmp comes or goes.

struct Checkpoint {
    std::string folder, name;
    LoopState state;
    fs::file_time_type written;
};

bool is_complete(const fs::path& folder) {
    std::error_code unreadable;
    for (const std::string& file : {CONFIG, WEIGHTS, OPTIMIZER, TRAINER})
        if (!fs::is_regular_file(folder / file, unreadable)) return false;
    return true;
}

bool present(const std::string& path) {  // also if it is a link that leads nowhere
    std::error_code unreadable;
    return fs::exists(fs::symlink_status(path, unreadable));
}

// "step-000300" and an end ("", ".old", ".tmp"); -1 if it is not such a name
int64_t step_of(const std::string& name, const std::string& end) {
    const std::string begin = "step-";
    if (name.rfind(begin, 0) != 0 || !ends_with(name, end) || name.size() < begin.size() + end.size()) return -1;
    const char *first = name.data() + begin.size(), *last = name.data() + name.size() - end.size();
    int64_t step = -1;
    const auto result = std::from_chars(first, last, step);
    return result.ec == std::errc() && result.ptr == last ? step : -1;
}

std::vector<fs::path> entries(const std::string& folder) {
    std::vector<fs::path> paths;
    for (const auto& entry : fs::directory_iterator(folder)) paths.push_back(entry.path());
    std::sort(paths.begin(), paths.end());
    return paths;
}

// Those that can be read, the one written first in front. A run into a folder that an earlier run filled has the lower steps,
// but later.
std::vector<Checkpoint> checkpoints(const std::string& folder, const Tell& tell = {}) {
    std::vector<Checkpoint> found;
    for (const fs::path& path : entries(folder)) {
        const std::string name = path.filename().string();
        const bool old = step_of(name, ".old") >= 0;
        if (!old && step_of(name, "") < 0) continue;
        try {
            if (!is_complete(path)) throw Error("it is not a folder with the four files of a checkpoint.");
            for (const std::string& file : {WEIGHTS, OPTIMIZER}) Safetensors(join(path.string(), file));
            found.push_back({path.string(), name, read_loop_state(path.string()), fs::last_write_time(path / TRAINER)});
        } catch (const std::exception& e) {
            if (tell && !old) tell(path.string() + " cannot be read as a checkpoint and is passed over: " + e.what());
        }
    }
    std::stable_sort(found.begin(), found.end(), [](const Checkpoint& a, const Checkpoint& b) {
        return std::pair(a.written, a.state.step) < std::pair(b.written, b.state.step);
    });
    return found;
}

// A checkpoint goes under a name that is none: a kill while its files go leaves nothing of a good name.
void remove(const Checkpoint& c) {
    const std::string leaving = c.folder + ".tmp";
    fs::rename(c.folder, leaving);
    fs::remove_all(leaving);
}

void remove_leftovers(const std::string& out) {
    std::error_code ignored;  // what cannot be removed does not end a run
    for (const fs::path& path : entries(out))
        for (const char* end : {".tmp", ".old.tmp"})
            if (step_of(path.filename().string(), end) >= 0) fs::remove_all(path, ignored);
}

void write_checkpoint(const std::string& folder, Model& model, const LoopState& state) {
    fs::create_directory(folder);
    write_json(join(folder, CONFIG), config_json(model.setup().config));
    save_weights(join(folder, WEIGHTS), model);
    save_optimizer(join(folder, OPTIMIZER), model);
    save_loop_state(folder, state, model.setup());
    sync_folder(folder);
}

std::vector<Checkpoint> checkpoints_of(const std::string& run, const std::string& out) {
    std::vector<Checkpoint> own;
    for (const Checkpoint& c : checkpoints(out))
        if (!run.empty() && c.state.run == run) own.push_back(c);
    return own;
}

// At every moment either `folder` or `folder`.old or both are complete. What stands there and is not this run's own stays,
// under another name.
void replace(const std::string& folder, const std::string& by, const std::string& run) {
    if (present(folder)) {
        const std::string name = fs::path(folder).filename().string();
        bool own = false;
        for (const Checkpoint& c : checkpoints_of(run, fs::path(folder).parent_path().string())) {
            own |= c.name == name;
            if (c.name == name + ".old") remove(c);
        }
        std::string aside = folder + (own ? ".old" : ".other");
        while (present(aside)) aside += ".other";
        fs::rename(folder, aside);
    }
    fs::rename(by, folder);
    sync_folder(fs::path(folder).parent_path().string());
}

// Checkpoints of later steps stay: the run was resumed from one before them.
void remove_older(const std::string& out, const LoopState& state, int keep) {
    std::vector<Checkpoint> older;
    for (const Checkpoint& c : checkpoints_of(state.run, out)) {
        if (step_of(c.name, ".old") >= 0) remove(c);
        else if (c.state.step < state.step) older.push_back(c);
    }
    std::sort(older.begin(), older.end(), [](const Checkpoint& a, const Checkpoint& b) { return a.state.step > b.state.step; });
    double lowest = state.validation;
    std::string best;  // stays empty if the new one is the best
    for (const Checkpoint& c : older)
        if (c.state.validation < lowest || (std::isnan(lowest) && !std::isnan(c.state.validation))) lowest = c.state.validation, best = c.folder;
    for (size_t i = static_cast<size_t>(std::max(keep, 1)) - 1; i < older.size(); i++)
        if (older[i].folder != best) remove(older[i]);
}

// std::filesystem's exceptions name the reason and mostly the path; they lack the cure.
template <class Function>
auto with_cure(const std::string& folder, Function&& f) {
    try {
        return f();
    } catch (const fs::filesystem_error& e) {
        throw Error("Cannot use " + (e.path1().empty() ? folder : e.path1().string()) + " (" + e.code().message() + "); check the disk and permissions, or give another folder with --out.");
    }
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------

ModelConfig read_model_config(const std::string& folder) {
    if (!fs::is_directory(folder)) throw Error(folder + " is not a folder; give a Hugging Face model folder.");
    const Fields f{join(folder, CONFIG), read_json(join(folder, CONFIG))};
    const std::string type = f.text("model_type");
    if (type != LLAMA.name && type != GPT2.name) f.refuse("model_type", "is \"" + shown(type) + "\"; this program implements llama and gpt2");
    ModelConfig c = type == LLAMA.name ? read_llama(f) : read_gpt2(f);
    c.name = folder;
    validate(c);
    return c;
}

void check_weights(const std::string& folder, const ModelConfig& config) { sources_of(WeightFiles(folder), config); }

void load_weights(const std::string& folder, Model& model) {
    const WeightFiles files(folder);
    const std::vector<Source> sources = sources_of(files, model.setup().config);  // all are checked before the model is touched
    const Source *source = sources.data(), *end = source + sources.size();
    for (const Param& p : parameters(model.setup().config)) {  // sources come in the same order
        const Source* next = std::find_if(source, end, [&](const Source& s) { return s.piece.param.name != p.name; });
        write_parameter(model, p, source, next);
        source = next;
    }
}

std::string save_checkpoint(const std::string& out, Model& model, const LoopState& state, int keep) {
    char name[32];
    std::snprintf(name, sizeof name, "step-%06lld", static_cast<long long>(state.step));
    const std::string folder = join(out, name), temporary = folder + ".tmp";
    return with_cure(out, [&] {
        std::error_code failed;
        create_folders(out, failed);
        if (failed) throw fs::filesystem_error("", out, failed);
        remove_leftovers(out);
        try {
            write_checkpoint(temporary, model, state);
            replace(folder, temporary, state.run);
        } catch (...) {
            std::error_code ignored;  // the first error is the one to tell
            fs::remove_all(temporary, ignored);
            throw;
        }
        remove_older(out, state, keep);
        return folder;
    });
}

std::string find_checkpoint(const std::string& folder, const Tell& tell) {
    return with_cure(folder, [&] {
        if (!fs::is_directory(folder)) throw Error(folder + " is not a folder; give a checkpoint, or a folder of them.");
        if (is_complete(folder)) return folder;
        const std::vector<Checkpoint> found = checkpoints(folder, tell);
        if (found.empty()) throw Error(folder + " holds no complete checkpoint; give a folder that a run with --out wrote.");
        return found.back().folder;
    });
}

LoopState read_loop_state(const std::string& checkpoint) {
    const Fields f{join(checkpoint, TRAINER), read_json(join(checkpoint, TRAINER))};
    if (f.text("format") != "coat checkpoint") f.refuse("format", "is not \"coat checkpoint\"; give another --resume");
    if (f.natural("version") != CHECKPOINT_VERSION)
        f.refuse("version", "is " + shown(f.object["version"]) + ", this program reads version " + std::to_string(CHECKPOINT_VERSION) +
                                "; resume it with the program that wrote it");
    LoopState s;
    s.step = f.natural("step");
    s.updates = f.natural("updates");
    if (s.updates > s.step) f.refuse("updates", "is " + std::to_string(s.updates) + " after " + std::to_string(s.step) + " steps; give another --resume");
    s.position = {f.natural("epoch"), f.natural("window")};
    s.tokens = f.natural("tokens");
    const json first = f.object.value("first_validation", json());
    s.first_validation = first.is_number() ? first.get<double>() : std::numeric_limits<double>::quiet_NaN();
    s.norm_correction = f.not_negatives("norm_correction");
    s.settings = f.text("settings");
    if (f.has("run")) s.run = f.text("run");
    const json validation = f.object.value("validation", json());
    if (validation.is_number()) s.validation = validation.get<double>();
    return s;
}

void load_checkpoint(const std::string& checkpoint, Model& model) {
    const Setup& setup = model.setup();
    need_same_shape(checkpoint, read_model_config(checkpoint), setup.config);
    const Safetensors file(join(checkpoint, OPTIMIZER));
    need_same_run(file, setup);
    const std::vector<StateTensor> table = optimizer_tensors(setup);
    for (const StateTensor& t : table) {  // all are checked before the model is touched
        expect(file, t.name, t.dtype, t.shape);
        need_sound(file, t);
    }
    check_weights(checkpoint, setup.config);
    need_same_bytes(checkpoint);
    load_weights(checkpoint, model);
    for (const StateTensor& t : table) model.write(t.name, file.find(t.name)->data);
}

}  // namespace coat

// data/model_folder.cpp - reads and writes Hugging Face's model folders (model_folder.h).
#include "model_folder.h"

#include <algorithm>
#include <cstring>
#include <list>

#include "../program/ranks.h"

namespace coat {
namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

namespace {

// Names. Our parameters are fused: qkv has the rows of three Hugging Face tensors, gate_up those of two. They
// follow each other in the tables as in the parameter. Weight and bias have the same name but for its end.

struct Names {
    const char* ours;
    std::vector<std::string> llama;  // and Mistral and Qwen2
    std::vector<std::string> gpt2;
};
const std::vector<Names> NAMES = {
    {"embedding", {"model.embed_tokens"}, {"transformer.wte"}},
    {"positions", {}, {"transformer.wpe"}},
    {"norm1", {"input_layernorm"}, {"ln_1"}},
    {"qkv", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}, {"attn.c_attn"}},
    {"attention_out", {"self_attn.o_proj"}, {"attn.c_proj"}},
    {"norm2", {"post_attention_layernorm"}, {"ln_2"}},
    {"gate_up", {"mlp.gate_proj", "mlp.up_proj"}, {"mlp.c_fc"}},
    {"down", {"mlp.down_proj"}, {"mlp.c_proj"}},
    {"final_norm", {"model.norm"}, {"transformer.ln_f"}},
    {"head", {"lm_head"}, {"lm_head"}},
};
// Ends of the names of buffers, which are not learned.
const std::vector<std::string> BUFFERS = {".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"};

// One tensor of a Hugging Face file: rows [first, first + rows) of one parameter. A vector counts as a
// column: a bias of q, k and v has their rows, too.
struct Piece {
    std::string theirs;
    Param param;
    int64_t first, rows;
    bool transposed;
    const Tensor* tensor = nullptr;  // of a file that is read

    int64_t cols() const { return param.rows == 1 ? 1 : param.cols; }
    int64_t size() const { return rows * cols(); }
    std::vector<int64_t> shape() const {  // in the file
        if (param.rows == 1) return {rows};
        return transposed ? std::vector<int64_t>{cols(), rows} : std::vector<int64_t>{rows, cols()};
    }
    // The index in the whole parameter of element i of the file's tensor.
    int64_t index_in_param(int64_t i) const {
        return transposed ? (first + i % rows) * cols() + i / rows : first * cols() + i;
    }
};

// All pieces of a model, in the order of its parameters.
std::vector<Piece> pieces(const ModelConfig& c) {
    const bool llama = c.arch.rope;
    std::vector<Piece> result;
    for (const Param& p : parameters(c)) {
        // "layers.3.qkv.bias" has the layer "3.", the name "qkv" and the end ".bias".
        const size_t number = p.name.rfind("layers.", 0) == 0 ? 7 : 0,
                     begin = number ? p.name.find('.', number) + 1 : 0;
        const std::string layer = p.name.substr(number, begin - number),
                          ours = p.name.substr(begin, p.name.find('.', begin) - begin),
                          before = !number ? "" : (llama ? "model.layers." : "transformer.h.") + layer,
                          end = ends_with(p.name, ".bias") ? ".bias" : ".weight";
        const auto row =
            std::find_if(NAMES.begin(), NAMES.end(), [&](const Names& n) { return n.ours == ours; });
        // The rows of each: q, k, v; gate, up; or all without those that pad our vocabulary.
        const std::vector<std::string>& names = llama ? row->llama : row->gpt2;
        std::vector<int64_t> rows = {used_elements(c, p) / (p.rows == 1 ? 1 : p.cols)};
        if (names.size() == 3) rows = {c.q_cols(), c.kv_cols(), c.kv_cols()};
        if (names.size() == 2) rows = {c.F, c.F};
        int64_t first = 0;
        for (size_t i = 0; i < names.size(); first += rows[i++])
            result.push_back({before + names[i] + end, p, first, rows[i], !llama && p.role.linear});
    }
    return result;
}

// The sizes of a model, for reading and writing; the names are those of Llama and of GPT-2. A size that is
// not required has a default in transformers, which read_model_config sets.
struct Size {
    const char *llama, *gpt2;
    int64_t ModelConfig::*member;
    bool required;
};
const Size SIZES[] = {
    {"num_hidden_layers", "n_layer", &ModelConfig::L, true},
    {"hidden_size", "n_embd", &ModelConfig::C, true},
    {"num_attention_heads", "n_head", &ModelConfig::NH, true},
    {"num_key_value_heads", nullptr, &ModelConfig::NKV, false},
    {"head_dim", nullptr, &ModelConfig::head_size, false},
    {"intermediate_size", "n_inner", &ModelConfig::F, false},
    {"vocab_size", "vocab_size", &ModelConfig::V, true},
    {"max_position_embeddings", "n_positions", &ModelConfig::max_T, false},
};
const char* norm_eps_field(const Architecture& arch) {
    return arch.rms ? "rms_norm_eps" : "layer_norm_epsilon";
}

// How config.json names an architecture: its model_type (Architecture::name), and its class in transformers.
const std::pair<Architecture, const char*> ARCHITECTURES[] = {{LLAMA, "LlamaForCausalLM"},
                                                              {MISTRAL, "MistralForCausalLM"},
                                                              {QWEN2, "Qwen2ForCausalLM"},
                                                              {GPT2, "GPT2LMHeadModel"}};

// Fields that change the arithmetic of a model, with the values that this program implements, if present.
using Implemented = std::map<std::string, std::vector<json>>;
const Implemented IMPLEMENTED = {
    {"hidden_act", {"silu", "swish"}},
    {"attention_bias", {false}},
    {"mlp_bias", {false}},
    {"activation_function", {"gelu_new", "gelu_pytorch_tanh"}},
    {"scale_attn_weights", {true}},
    {"scale_attn_by_inverse_layer_idx", {false}},
    {"add_cross_attention", {false}},
    {"partial_rotary_factor", {1.0}},
    {"quantization_config", {}},
};

void require_implemented(const Fields& f, const Implemented& table) {
    for (const auto& [field, values] : table)
        if (f.has(field) && !std::count(values.begin(), values.end(), f.object[field]))
            f.reject(field, values.empty() ? "missing" : "one of " + json(values).dump());
}

RopeScaling read_rope_scaling(const Fields& rope) {
    const std::string field = rope.has("rope_type") ? "rope_type" : "type";  // "type" in older files
    require_implemented(rope, {{field, {"default", "llama3"}}, {"partial_rotary_factor", {1.0}}});
    RopeScaling s;
    if (rope.get<std::string>(field, "default") == "default") return s;
    s.type = RopeScaling::Llama3;
    s.factor = rope.get<float>("factor");
    s.low_freq_factor = rope.get<float>("low_freq_factor");
    s.high_freq_factor = rope.get<float>("high_freq_factor");
    s.original_positions = rope.get<int64_t>("original_max_position_embeddings");
    if (s.low_freq_factor >= s.high_freq_factor) rope.reject("high_freq_factor", "above low_freq_factor");
    return s;
}

// The sliding window; 0: none. In a Mistral a missing field means 4096, and null none. A Qwen2 has one in
// some layers only: those that layer_types lists, or those from max_window_layers on.
int64_t read_window(const Fields& f, const ModelConfig& c) {
    const std::string type = c.arch.name;
    if (type == "mistral" && f.object.contains("sliding_window")) return f.get<int64_t>("sliding_window", 0);
    if (type == "mistral") return 4096;
    if (type != "qwen2" || !f.get<bool>("use_sliding_window", false)) return 0;
    const json types = f.has("layer_types") ? f.object["layer_types"] : json();
    const bool slides = types.is_null() ? f.get<int64_t>("max_window_layers", 28) < c.L
                                        : std::count(types.begin(), types.end(), "sliding_attention") > 0;
    return slides ? f.get<int64_t>("sliding_window", 4096) : 0;
}

// config.json of a named model.
ordered_json config_json(const ModelConfig& c) {
    ordered_json j;
    for (const auto& [arch, causal_lm] : ARCHITECTURES)
        if (arch.name == std::string(c.arch.name))
            j = {{"architectures", {causal_lm}}, {"model_type", arch.name}};
    for (const Size& size : SIZES)
        if (const char* field = c.arch.rope ? size.llama : size.gpt2) j[field] = c.*size.member;
    j[norm_eps_field(c.arch)] = c.norm_eps;
    j["tie_word_embeddings"] = c.tied;
    if (c.arch.rope)
        j.update({{"head_dim", c.HS()},
                  {"rope_theta", c.rope_theta},
                  {"hidden_act", "silu"},
                  {"sliding_window", {}}});
    else
        j.update(
            {{"activation_function", "gelu_new"}, {"resid_pdrop", 0}, {"embd_pdrop", 0}, {"attn_pdrop", 0}});
    const RopeScaling& s = c.rope_scaling;
    if (s.type == RopeScaling::Llama3)
        j["rope_scaling"] = {{"rope_type", "llama3"},
                             {"factor", s.factor},
                             {"low_freq_factor", s.low_freq_factor},
                             {"high_freq_factor", s.high_freq_factor},
                             {"original_max_position_embeddings", s.original_positions}};
    // Without these fields transformers assumes the special tokens of the original Llama or GPT-2.
    j["bos_token_id"] = j["eos_token_id"] = j["pad_token_id"] = nullptr;
    return j;
}

// Weights. A value passes through as the bits of an FP32 number, which weight and remainder are cut from
// (reference.h, split_master). No arithmetic changes it.

float from_f16(uint16_t half) {  // 5 bits of exponent with bias 15, and 10 of mantissa
    const int exponent = half >> 10 & 31, mantissa = half & 1023;
    const float magnitude =
        exponent == 31 ? INFINITY  // or NaN
                       : std::ldexp(float(exponent ? 1024 + mantissa : mantissa), std::max(exponent, 1) - 25);
    return half >> 15 ? -magnitude : magnitude;
}

// The bits of element i of a tensor in a file, at any alignment. Files and machine are little-endian.
uint32_t f32_bits(const Tensor& t, int64_t i) {
    const int width = t.dtype == "F32" ? 4 : 2;
    uint32_t bits = 0;
    std::memcpy(&bits, t.data + width * i, width);
    if (t.dtype == "BF16") return bits << 16;
    if (t.dtype == "F32") return bits;
    const float value = from_f16(uint16_t(bits));
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// The pieces of all parameters, each with its tensor. Large models come in several files, and a tensor is in
// exactly one of them. A tensor that no piece asks for is an error: it means another architecture than
// config.json says, such as one with biases, or a head where the embedding should be the head.
std::vector<Piece> find_tensors(const std::list<Safetensors>& files, const std::string& folder,
                                const ModelConfig& c) {
    std::map<std::string, const Tensor*> tensors;  // by name
    for (const Safetensors& file : files)
        for (const auto& [name, tensor] : file.tensors())
            if (!tensors.emplace(name, &tensor).second)
                throw Error(file.path(), " has tensor ", name,
                            ", which another file model*.safetensors also has; download the folder again.");
    std::vector<Piece> found = pieces(c);
    for (Piece& piece : found) {
        std::string name = piece.theirs;
        const std::string prefix = "transformer.";  // the files of GPT-2 itself leave it out
        if (!tensors.count(name) && name.rfind(prefix, 0) == 0) name.erase(0, prefix.size());
        const Tensor* const t = tensors.count(name) ? tensors[name] : nullptr;
        if (!t || t->shape != piece.shape() || (t->dtype != "BF16" && t->dtype != "F16" && t->dtype != "F32"))
            throw Error(folder, " has no tensor ", piece.theirs, " of shape ", json(piece.shape()).dump(),
                        " in BF16, F16 or F32; download the folder again, or give another model.");
        piece.tensor = t;
        tensors.erase(name);
    }
    for (const auto& [name, tensor] : tensors) {
        auto ends_name = [&, &name = name](const std::string& end) { return ends_with(name, end); };
        if (std::none_of(BUFFERS.begin(), BUFFERS.end(), ends_name))
            throw Error(folder, " has tensor ", name,
                        ", which the model of config.json does not have; give another model.");
    }
    return found;
}

// Writes one parameter from its pieces: weight = upper 16 bits of (FP32 bits + 0x8000), remainder = lower 16
// bits. NaN, infinity and what rounds to infinity are errors: the NaN 0x7FFFFFFF would become the weight -0.
void write_parameter(Model& model, const Param& p, const std::vector<Piece>& found) {
    constexpr uint32_t EXPONENT = 0x7F800000;
    std::vector<uint16_t> weight(p.size());  // rows that pad the vocabulary stay zero
    std::vector<int16_t> remainder(p.size());
    for (const Piece& piece : found) {
        if (piece.param.name != p.name) continue;
        int64_t bad = 0;
#pragma omp parallel for reduction(+ : bad)
        for (int64_t i = 0; i < piece.size(); i++) {
            const uint32_t bits = f32_bits(*piece.tensor, i), rounded = bits + 0x8000;
            const int64_t at = piece.index_in_param(i);
            weight[at] = uint16_t(rounded >> 16);
            remainder[at] = int16_t(bits & 0xFFFF);
            bad += (bits & EXPONENT) == EXPONENT || (rounded & EXPONENT) == EXPONENT;
        }
        if (bad)
            throw Error(model.setup().config.name, " has NaN, infinity or values beyond BF16 in tensor ",
                        piece.theirs, "; give other weights.");
    }
    const Setup& setup = model.setup();
    model.write(p.name, weight.data() + kept_weight(setup, p).first);
    if (setup.master) model.write(p.name + ".remainder", remainder.data() + owned(setup, p).first);
}

}  // namespace

ModelConfig read_model_config(const std::string& folder) {
    const Fields f = read_json(path_in(folder, "config.json"));
    std::vector<json> types;
    ModelConfig c{};
    c.name = folder;
    for (const auto& [arch, causal_lm] : ARCHITECTURES) {
        types.push_back(arch.name);
        if (f.get<std::string>("model_type") == arch.name) c.arch = arch;
    }
    require_implemented(f, {{"model_type", types}});
    require_implemented(f, IMPLEMENTED);
    c.max_T = c.arch.rope ? 2048 : 1024;
    for (const Size& size : SIZES)
        if (const char* field = c.arch.rope ? size.llama : size.gpt2;
            field && (size.required || f.has(field)))
            if ((c.*size.member = f.get<int64_t>(field)) == 0) f.reject(field, "above 0");
    if (!c.NKV) c.NKV = c.NH;
    if (!c.F && !c.arch.rope) c.F = 4 * c.C;
    c.tied = f.get<bool>("tie_word_embeddings", !c.arch.rope);
    c.norm_eps = f.get<float>(norm_eps_field(c.arch), c.arch.rms ? 1e-6f : 1e-5f);
    c.window = read_window(f, c);
    if (c.arch.rope) {
        // transformers 5 calls rope_scaling rope_parameters; it, too, prefers a rope_scaling with fields.
        Fields rope = f.get<Fields>("rope_scaling", Fields{f.path, json::object()});
        if (rope.object.empty()) rope = f.get<Fields>("rope_parameters", rope);
        c.rope_theta = rope.get<float>("rope_theta", f.get<float>("rope_theta", 10000.0f));
        c.rope_scaling = read_rope_scaling(rope);
    }
    validate(c);
    return c;
}

void load_weights(const std::string& folder, const ModelConfig& config, Model* model) {
    std::list<Safetensors> files;
    for (const fs::path& path : fs::directory_iterator(folder))
        if (path.filename().string().rfind("model", 0) == 0 && path.extension() == ".safetensors")
            files.emplace_back(path.string());
    const std::vector<Piece> found = find_tensors(files, folder, config);
    for (const Param& p : parameters(config))
        if (model) write_parameter(*model, p, found);
}

Companions read_companions(const std::string& folder) {
    const std::string names =
        " config.json generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json"
        " added_tokens.json vocab.json merges.txt tokenizer.model chat_template.json ";
    Companions files;
    for (const fs::path below : {"", "additional_chat_templates"})
        if (fs::is_directory(folder / below))
            for (const auto& entry : fs::directory_iterator(folder / below)) {
                const std::string name = entry.path().filename().string();
                std::error_code ignored;  // a link that leads nowhere, or to itself, is no file
                const bool known =
                    names.find(" " + name + " ") != std::string::npos || ends_with(name, ".jinja");
                if (!known || !entry.is_regular_file(ignored)) continue;
                const MappedFile file(entry.path().string());
                files[(below / name).string()].assign(reinterpret_cast<const char*>(file.data()),
                                                      file.bytes());
            }
    return files;
}

void save_model_folder(const std::string& folder, const ModelConfig& c, const Companions& companions,
                       const WholeTensor& whole) {
    for (const auto& [path, bytes] : companions) {
        const fs::path file = path_in(folder, path);
        fs::create_directories(file.parent_path());
        write_file(file.string(), bytes);
        sync_folder(file.parent_path().string());
    }
    // The config.json that the model came with stays as it is, but for the dtype, which has two names.
    const auto original = companions.find("config.json");
    ordered_json config =
        original == companions.end() ? config_json(c) : ordered_json::parse(original->second);
    config["torch_dtype"] = "bfloat16";
    config.erase("dtype");
    write_file(path_in(folder, "config.json"), config.dump(2) + "\n");

    const std::vector<Piece> table = pieces(c);
    std::vector<TensorInfo> tensors;
    for (const Piece& piece : table) tensors.push_back({piece.theirs, "BF16", piece.shape()});
    SafetensorsWriter file(path_in(folder, "model.safetensors"), tensors);
    for (const StateTensor& t : weight_tensors(c)) {
        const Bytes bytes = whole(t);
        const auto* all = reinterpret_cast<const uint16_t*>(bytes.data());  // from new: aligned
        for (const Piece& piece : table) {
            if (piece.param.name != t.name) continue;
            std::vector<uint16_t> part(piece.size());
            for (int64_t i = 0; i < piece.size(); i++) part[i] = all[piece.index_in_param(i)];
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
    Bytes whole;  // in the order of the ranks
    whole.reserve(setup.rank ? 0 : t.total_bytes());
    for (const Bytes& part : setup.processes->gather(mine, false))
        if (setup.rank == 0) whole.insert(whole.end(), part.begin(), part.end());
    return whole;
}

}  // namespace coat

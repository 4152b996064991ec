// data/safetensors.cpp - the reader that believes no header, and the writer that leaves no half file.
//
// A header can lie about everything: its own length, types, shapes, where the bytes are. All of it is compared with the size of
// the file before any tensor is handed out, so that what reads a tensor needs no check of its own.
#include "safetensors.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "json.h"

namespace coat {

namespace {

using Json = nlohmann::json;

constexpr int64_t LENGTH_BYTES = 8;
constexpr uint64_t MAX_HEADER = 100'000'000;  // the official reader's limit
constexpr size_t MAX_TENSORS = 100'000;
constexpr int64_t MAX_VALUES = 16 * MAX_TENSORS;  // in the header: a matrix has 8

struct Dtype {
    const char* name;
    int bytes;
};
constexpr Dtype DTYPES[] = {
    {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1}, {"I16", 2}, {"U16", 2}, {"F16", 2},
    {"BF16", 2}, {"I32", 4}, {"U32", 4}, {"F32", 4},     {"I64", 8},     {"U64", 8},     {"F64", 8}, {"C64", 8},
};

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
    throw Error(path + " is not a whole safetensors file (" + why + "); download it again, or choose another.");
}

std::string quoted(const std::string& name) { return "'" + escaped(name) + "'"; }

// Bytes of a tensor; -1 if the type is unknown or no such tensor fits into memory.
int64_t bytes_of(const TensorInfo& t) {
    const auto type = std::find_if(std::begin(DTYPES), std::end(DTYPES), [&](const Dtype& d) { return t.dtype == d.name; });
    if (type == std::end(DTYPES)) return -1;
    int64_t bytes = type->bytes;
    for (int64_t n : t.shape)
        if (n < 0 || __builtin_mul_overflow(bytes, n, &bytes)) return -1;
    return bytes;
}

// ---------------------------------------------------------------------------------------------------------------------
// Reading

int64_t header_bytes(const std::string& path, const MappedFile& file) {
    if (file.bytes < LENGTH_BYTES) refuse(path, "it has only " + std::to_string(file.bytes) + " bytes");
    uint64_t length;
    std::memcpy(&length, file.data(), sizeof length);
    if (length > MAX_HEADER) refuse(path, "its header would have " + std::to_string(length) + " bytes, more than 100 MB");
    if (static_cast<int64_t>(length) > file.bytes - LENGTH_BYTES)
        refuse(path, "its header would have " + std::to_string(length) + " bytes, but the file has " + std::to_string(file.bytes));
    return static_cast<int64_t>(length);
}

Json parse_header(const std::string& path, const uint8_t* text, int64_t length) {
    if (length == 0 || text[0] != '{') refuse(path, "its header is not a JSON object");
    std::string why;
    Json header = parse_json(text, length, &why, MAX_VALUES);
    if (!why.empty()) refuse(path, "its header " + why);
    return header;
}

std::map<std::string, std::string> take_metadata(const std::string& path, Json& header) {
    std::map<std::string, std::string> metadata;
    const auto found = header.find("__metadata__");
    if (found == header.end()) return metadata;
    if (!found->is_object()) refuse(path, "its metadata is not a JSON object");
    for (const auto& [key, value] : found->items()) {
        if (!value.is_string()) refuse(path, "the value of " + quoted(key) + " in its metadata is not text");
        metadata[key] = value.get<std::string>();
    }
    header.erase(found);
    return metadata;
}

std::vector<int64_t> counts(const std::string& path, const std::string& name, const Json& entry, const char* field) {
    std::vector<int64_t> numbers;
    if (!entry.contains(field) || !entry[field].is_array()) refuse(path, "tensor " + quoted(name) + " has no list " + field);
    for (const Json& n : entry[field]) {
        if (!n.is_number_unsigned() || n.get<uint64_t>() > INT64_MAX)
            refuse(path, "tensor " + quoted(name) + " has a number in " + field + " that is not a count");
        numbers.push_back(n.get<int64_t>());
    }
    return numbers;
}

struct Placed {
    TensorInfo info;
    int64_t begin, end;
};

Placed placed(const std::string& path, const std::string& name, const Json& entry) {
    if (!entry.is_object() || !entry.contains("dtype") || !entry["dtype"].is_string()) refuse(path, "tensor " + quoted(name) + " has no dtype");
    const TensorInfo info{name, entry["dtype"].get<std::string>(), counts(path, name, entry, "shape")};
    const std::vector<int64_t> offsets = counts(path, name, entry, "data_offsets");
    if (offsets.size() != 2 || offsets[0] > offsets[1]) refuse(path, "tensor " + quoted(name) + " has data_offsets that are no range");
    const int64_t bytes = bytes_of(info), range = offsets[1] - offsets[0];
    if (bytes != range)
        refuse(path, "tensor " + quoted(name) + ", " + quoted(info.dtype) + " " + shape_text(info.shape) + ", cannot be the " + std::to_string(range) +
                         " bytes that its data_offsets say");
    return {info, offsets[0], offsets[1]};
}

}  // namespace

std::string shape_text(const std::vector<int64_t>& shape) {
    std::string text;
    for (int64_t n : shape) text += (text.empty() ? "" : ", ") + std::to_string(n);
    return "[" + text + "]";
}

Safetensors::Safetensors(const std::string& path) : file_(map_file(path)) {
    const int64_t length = header_bytes(path, file_), start = LENGTH_BYTES + length;
    Json header = parse_header(path, file_.data() + LENGTH_BYTES, length);
    metadata_ = take_metadata(path, header);
    if (header.size() > MAX_TENSORS)
        refuse(path, "it has " + std::to_string(header.size()) + " tensors, more than the " + std::to_string(MAX_TENSORS) + " that are supported");
    std::vector<Placed> all;
    for (const auto& [name, entry] : header.items()) all.push_back(placed(path, name, entry));
    std::sort(all.begin(), all.end(), [](const Placed& a, const Placed& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
    int64_t at = 0;
    for (const Placed& p : all) {
        if (p.begin != at) refuse(path, "tensor " + quoted(p.info.name) + (p.begin < at ? " overlaps the one before" : " comes after a hole"));
        at = p.end;
    }
    if (at != file_.bytes - start)
        refuse(path, "its tensors take " + std::to_string(at) + " bytes, but " + std::to_string(file_.bytes - start) + " follow the header");
    for (const Placed& p : all) {
        index_[p.info.name] = tensors_.size();
        tensors_.push_back({p.info, file_.data() + start + p.begin, p.end - p.begin});
    }
}

const Tensor* Safetensors::find(const std::string& name) const {
    const auto found = index_.find(name);
    return found == index_.end() ? nullptr : &tensors_[found->second];
}

// ---------------------------------------------------------------------------------------------------------------------
// Writing

SafetensorsWriter::SafetensorsWriter(const std::string& path, const std::vector<TensorInfo>& tensors,
                                     const std::map<std::string, std::string>& metadata)
    : file_(path) {
    std::string text = metadata.empty() ? "" : "\"__metadata__\":" + Json(metadata).dump();  // by hand: ordered_json is quadratic
    std::set<std::string> names;
    for (const TensorInfo& t : tensors) {
        const int64_t bytes = bytes_of(t);
        if (bytes < 0 || !names.insert(t.name).second) throw std::logic_error("no safetensors file can hold the tensor " + t.name);
        const nlohmann::ordered_json entry = {{"dtype", t.dtype}, {"shape", t.shape}, {"data_offsets", {left_, left_ + bytes}}};
        text += (text.empty() ? "" : ",") + Json(t.name).dump() + ":" + entry.dump();
        left_ += bytes;
    }
    text = "{" + text + "}";
    text.resize(static_cast<size_t>(round_up(static_cast<int64_t>(text.size()), 8)), ' ');  // tensors begin at a multiple of 8
    const uint64_t length = text.size();
    file_.write(&length, sizeof length);
    file_.write(text.data(), static_cast<int64_t>(length));
}

void SafetensorsWriter::write(const void* data, int64_t bytes) {
    file_.write(data, bytes);
    left_ -= bytes;
}

void SafetensorsWriter::finish() {
    if (left_ != 0) throw std::logic_error("the tensors' bytes are not those that the header promises");
    file_.finish();
}

}  // namespace coat

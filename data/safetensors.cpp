// data/safetensors.cpp - reads and writes safetensors files (safetensors.h).
//
// A header can be wrong about everything: its length, dtypes, shapes, and where the bytes are. The reader
// compares all of it with the file before it returns a tensor, so that users of a tensor need no checks of
// their own.
#include "safetensors.h"

#include "../coat.h"
#include "json.h"

namespace coat {

namespace {

using Json = nlohmann::json;

constexpr int64_t LENGTH_BYTES = 8;
constexpr uint64_t MAX_HEADER = 100'000'000;  // bytes; the official reader has the same limit
constexpr size_t MAX_TENSORS = 100'000;
constexpr int64_t MAX_VALUES = 16 * MAX_TENSORS;  // in the JSON of the header: a matrix has 8

const std::map<std::string, int> BYTES_OF_DTYPE = {  // of one element
    {"BOOL", 1}, {"U8", 1}, {"I8", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1},
    {"I16", 2}, {"U16", 2}, {"F16", 2}, {"BF16", 2}, {"I32", 4}, {"U32", 4}, {"F32", 4},
    {"I64", 8}, {"U64", 8}, {"F64", 8}, {"C64", 8},
};

template <class... Parts>
[[noreturn]] void reject(const std::string& path, const Parts&... why) {
    throw Error(path, " is not a complete safetensors file (", why...,
                "); download it again, or give another.");
}

std::string shape_text(const std::vector<int64_t>& shape) {  // "[50257, 768]"
    std::string text;
    for (int64_t n : shape) text += (text.empty() ? "" : ", ") + std::to_string(n);
    return "[" + text + "]";
}

// Bytes of a tensor; -1 if its dtype is unknown or the product overflows.
int64_t bytes_of(const TensorInfo& t) {
    const auto type = BYTES_OF_DTYPE.find(t.dtype);
    if (type == BYTES_OF_DTYPE.end()) return -1;
    int64_t bytes = type->second;
    for (int64_t n : t.shape)
        if (n < 0 || __builtin_mul_overflow(bytes, n, &bytes)) return -1;
    return bytes;
}

}  // namespace

Safetensors::Safetensors(const std::string& path) : file_(path) {
    if (file_.bytes() < LENGTH_BYTES) reject(path, "it has only ", file_.bytes(), " bytes");
    uint64_t length;
    std::memcpy(&length, file_.data(), sizeof length);
    const std::string header_has = concat("its header says that it has ", length, " bytes, ");
    if (length > MAX_HEADER) reject(path, header_has, "more than 100 MB");
    const auto start = LENGTH_BYTES + int64_t(length);
    if (start > file_.bytes()) reject(path, header_has, "but the file has ", file_.bytes());
    const uint8_t* text = file_.data() + LENGTH_BYTES;
    std::string why;
    Json header = parse_json(text, int64_t(length), &why, MAX_VALUES);
    if (!why.empty()) reject(path, "its header ", why);

    const Fields metadata = Fields{path, header}.inner("__metadata__");
    for (const auto& [key, value] : metadata.object.items()) metadata.text(key);  // Error if it is no text
    header.erase("__metadata__");
    if (header.size() > MAX_TENSORS)
        reject(path, "it has ", header.size(), " tensors, and at most ", MAX_TENSORS, " are supported");
    std::multimap<std::vector<int64_t>, TensorInfo> by_range;  // of bytes after the header: begin, end
    for (const auto& [name, entry] : header.items()) {
        const Fields f{path + ": tensor '" + escaped(name) + "'", entry};
        const TensorInfo info{name, f.text("dtype"), f.naturals("shape")};
        const std::vector<int64_t> range = f.naturals("data_offsets");
        const int64_t bytes = bytes_of(info);
        if (range.size() != 2 || bytes < 0 || range[1] - range[0] != bytes)
            f.reject("data_offsets", "must be a range of the bytes of dtype '", escaped(info.dtype),
                     "' and shape ", shape_text(info.shape), ", not ", Fields::excerpt(f.at("data_offsets")),
                     "; download it again");
        by_range.insert({range, info});
    }
    // In the order of their bytes, each tensor begins where the one before ends, and the last ends with the
    // file. So no byte belongs to two tensors or to none.
    int64_t end = 0;  // of the tensors so far
    for (const auto& [range, info] : by_range) {
        if (range[0] != end)
            reject(path, "tensor '", escaped(info.name), "' ",
                   range[0] < end ? "overlaps the one before" : "begins after a gap");
        end = range[1];
        index_[info.name] = tensors_.size();
        tensors_.push_back({info, file_.data() + start + range[0], range[1] - range[0]});
    }
    if (end != file_.bytes() - start)
        reject(path, "its tensors have ", end, " bytes, but ", file_.bytes() - start, " follow the header");
}

const Tensor* Safetensors::find(const std::string& name) const {
    const auto found = index_.find(name);
    return found == index_.end() ? nullptr : &tensors_[found->second];
}

const Tensor& Safetensors::require(const std::string& name, const std::string& dtype,
                                   const std::vector<int64_t>& shape) const {
    const Tensor* t = find(name);
    if (!t) throw Error(path(), " has no tensor ", name, "; it belongs to another model.");
    if (t->dtype != dtype || t->shape != shape)
        throw Error(path(), " has tensor ", name, " as ", t->dtype, " ", escaped(shape_text(t->shape)),
                    ", not as ", dtype, " ", shape_text(shape), "; it belongs to another model.");
    return *t;
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, const std::vector<TensorInfo>& tensors)
    : file_(path) {
    // All offsets follow from the table, so the header is complete before the first byte of a tensor.
    // The outer object is written by hand: adding to an ordered_json takes quadratic time.
    std::string text = R"({"__metadata__":{"format":"pt"})";  // transformers needs the format
    for (const TensorInfo& t : tensors) {
        const int64_t bytes = bytes_of(t);
        const nlohmann::ordered_json entry = {
            {"dtype", t.dtype}, {"shape", t.shape}, {"data_offsets", {left_, left_ + bytes}}};
        text += "," + Json(t.name).dump() + ":" + entry.dump();
        left_ += bytes;
    }
    text += "}";
    text.resize(round_up(text.size(), 8), ' ');  // aligns the tensors to 8
    const uint64_t length = text.size();
    file_.write(&length, sizeof length);
    file_.write(text.data(), int64_t(length));
}

void SafetensorsWriter::write(const void* data, int64_t bytes) {
    file_.write(data, bytes);
    left_ -= bytes;
}

void SafetensorsWriter::finish() {
    if (left_ != 0) throw std::logic_error("the bytes written are not those of the table of tensors");
    file_.finish();
}

}  // namespace coat

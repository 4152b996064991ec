// data/safetensors.h - files: read as memory, written and synced; JSON; and tensors (safetensors.cpp).
//
// A file may come from anywhere and be wrong about everything. What is wrong is an Error that names the file
// and, in JSON, the field and what was expected. The format (https://huggingface.co/docs/safetensors): in 8
// bytes the little-endian length n; n bytes of JSON {name: {dtype, shape, data_offsets}}; the tensors' bytes.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <vector>
#include <nlohmann/json.hpp>

#include "../error.h"

namespace coat {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;  // its fields keep their order

inline bool ends_with(const std::string& text, const std::string& end) {
    return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

inline std::string path_in(const std::string& folder, const std::string& file) {
    return (fs::path(folder) / file).string();
}

// A whole file as memory, read only. Pages are read when they are touched, so it may be larger than memory.
// The file is not kept open: there may be thousands. To touch a page that is no longer there, because the
// file became shorter, ends the program.
class MappedFile {
public:
    explicit MappedFile(
        const std::string& path);  // std::bad_alloc if there is no room for it among addresses
    MappedFile(const MappedFile&) = delete;
    ~MappedFile();
    const uint8_t* data() const { return static_cast<const uint8_t*>(memory_); }  // null if the file is empty
    int64_t bytes() const { return bytes_; }
    std::string_view text() const { return {static_cast<const char*>(memory_), static_cast<size_t>(bytes_)}; }
    void require_whole() const;  // Error if the file has become shorter

private:
    const std::string path_;
    void* memory_ = nullptr;
    int64_t bytes_ = 0;
    uint64_t device_ = 0, number_ = 0;  // what the file is, also when another takes its name
};

// Of a hash so far and the bytes that follow: a change in one word always changes the result.
uint64_t hash_bytes(const void* data, int64_t bytes, uint64_t hash);
uint64_t hash_of(const MappedFile& file);
std::string hash_file(const std::string& path);  // likewise, as a decimal number

// Closes a file and waits until it is on the disk; Error if a write failed, after which others do nothing.
void finish(std::ofstream& file, const std::string& path);
void save_file(const std::string& path, const std::string& bytes);

// Waits until a file, or the names in a folder, are on the disk: a new name survives a power failure then.
void sync(const std::string& path);

// The fields of one JSON object. A field that is null counts as missing, as in Hugging Face's config.json.
struct Fields {
    std::string path;  // of the file, for errors
    json object;

    bool has(const std::string& field) const { return object.contains(field) && !object[field].is_null(); }
    [[noreturn]] void reject(const std::string& field, const std::string& expected) const;
    // The field as a T (int64_t: a whole number up to 10^15, so that sums do not overflow; float: a positive
    // number; double; bool; std::string; std::vector<int64_t>; Fields: an object). A missing field is
    // `otherwise`, or an Error if there is none.
    template <class T> T get(const std::string& field, const std::optional<T>& otherwise = {}) const {
        if (otherwise && !has(field)) return *otherwise;
        const json x = has(field) ? object[field] : json();
        auto natural = [](auto& n) { return n.is_number_unsigned() && n.template get<double>() <= 1e15; };
        auto require = [&](bool ok, const char* expected) {
            if (!ok) reject(field, expected);
        };
        if constexpr (std::is_same_v<T, int64_t>) require(natural(x), "a whole number up to 10^15");
        if constexpr (std::is_same_v<T, float>)
            require(x.is_number() && x.get<float>() > 0 && x.get<float>() < INFINITY, "a positive number");
        if constexpr (std::is_same_v<T, double>) require(x.is_number(), "a number");
        if constexpr (std::is_same_v<T, bool>) require(x.is_boolean(), "true or false");
        if constexpr (std::is_same_v<T, std::string>) require(x.is_string(), "text");
        if constexpr (std::is_same_v<T, std::vector<int64_t>>)
            require(x.is_array() && std::all_of(x.begin(), x.end(), natural),
                    "a list of whole numbers up to 10^15");
        if constexpr (std::is_same_v<T, Fields>) return require(x.is_object(), "an object"), Fields{path, x};
        else return x.get<T>();
    }
};

// Error if the text is not an object, is nested too deep, or takes too much memory.
Fields read_json(const std::string& path);

struct Tensor {
    std::string name, dtype;  // dtype as in the file: "BF16", "F8_E4M3", ...
    std::vector<int64_t> shape;
    const uint8_t* data = nullptr;  // of a file that is read, at any alignment: copy values with memcpy
    int64_t bytes = 0;
};

// The tensors of one file, or those of a folder: in model.safetensors, or else in the files that
// model.safetensors.index.json names, or else in all files model*.safetensors. Large models come in several.
class Safetensors {
public:
    explicit Safetensors(const std::string& path);  // Error if a header does not describe its file
    const std::string& path() const { return path_; }
    const std::map<std::string, Tensor>& tensors() const { return tensors_; }
    // The tensor of this name; Error unless it has this shape and one of these dtypes ("BF16 F16").
    const Tensor& require(const std::string& name, const std::vector<int64_t>& shape,
                          const std::string& dtypes) const;

private:
    void add(const std::string& file);
    const std::string path_;
    std::list<MappedFile> files_;
    std::map<std::string, Tensor> tensors_;
};

// What a safetensors file with these tensors begins with. Their bytes follow in this order.
std::string safetensors_header(const std::vector<Tensor>& tensors);

}  // namespace coat

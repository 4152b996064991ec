// data/safetensors.cpp - safetensors files, read and written (safetensors.h).
#include "safetensors.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "../common/formats.h"
#include "json.h"

namespace coat {

// The bytes of an element. The number in the name of a dtype is its bits. -1: there is no such dtype.
static int64_t element_bytes(const std::string& dtype) {
    if (dtype == "BOOL") return 1;
    const size_t digits = dtype.find_first_of("0123456789");
    const int bits = digits == dtype.npos ? 0 : std::atoi(&dtype[digits]);
    return bits == 8 || bits == 16 || bits == 32 || bits == 64 ? bits / 8 : -1;
}

// The bytes of a tensor; -1 if there is no such dtype, or if the number overflows.
static int64_t bytes_of(const HfTensor& tensor) {
    int64_t bytes = element_bytes(tensor.dtype);
    for (const int64_t n : tensor.shape)
        if (bytes < 0 || __builtin_mul_overflow(bytes, n, &bytes)) return -1;
    return bytes;
}

// The files that an index names: {"weight_map": {name of a tensor: name of a file}}. Which tensors a file has
// is read from its header. An index may come from anywhere, so only files of its own folder are read.
static std::set<std::string> files_of_index(const std::string& path) {
    const Fields map{path + ", weight_map", read_json(path).get<Fields>("weight_map").object};
    std::set<std::string> files;
    for (const auto& [tensor, value] : map.object.items()) {
        const std::string file = value.is_string() ? value.get<std::string>() : "";
        const bool plain = file.find('/') == file.npos && file.find('\0') == file.npos;
        if (!plain || !file.ends_with(".safetensors"))
            map.reject(tensor, "the name of a safetensors file in the same folder");
        files.insert(file);
    }
    return files;
}

// The files of a folder that have its weights, as transformers chooses them.
static std::set<std::string> weight_files(const std::string& folder) {
    std::set<std::string> files;
    const std::string index = path_in(folder, "model.safetensors.index.json"), single = "model.safetensors";
    if (fs::exists(index)) files = files_of_index(index);  // a wrong index is an Error even if it is not used
    if (fs::exists(path_in(folder, single))) return {single};
    if (!files.empty()) return files;
    for (const fs::path& file : fs::directory_iterator(folder))
        if (file.filename().string().starts_with("model") && file.extension() == ".safetensors")
            files.insert(file.filename().string());
    return files;
}

Safetensors::Safetensors(const std::string& path) : path_(path) {
    if (fs::is_directory(path)) {
        for (const std::string& file : weight_files(path)) add(path_in(path, file));
    } else {
        add(path);
    }
}

// Compares all of the header with the file, so that users of a tensor need no checks of their own.
void Safetensors::add(const std::string& path) {
    const MappedFile& file = files_.emplace_back(path);
    const auto require_whole = [&](bool ok) {
        if (!ok) throw Error(path, " is not a whole safetensors file; download it again, or give another.");
    };
    uint64_t header_bytes = 0;
    constexpr int64_t LENGTH = sizeof header_bytes;
    require_whole(file.bytes() >= LENGTH);
    std::memcpy(&header_bytes, file.data(), LENGTH);
    require_whole(header_bytes <= uint64_t(file.bytes() - LENGTH));
    const uint8_t* const tensors = file.data() + LENGTH + header_bytes;
    const int64_t tensors_bytes = file.data() + file.bytes() - tensors;

    std::vector<std::pair<int64_t, int64_t>> ranges;  // first and last + 1 of the bytes of each tensor
    Fields header = parse_json(path, file.text().substr(LENGTH, header_bytes));
    header.object.erase("__metadata__");
    for (const auto& [name, entry] : header.object.items()) {
        const Fields fields{path + ", tensor " + name.substr(0, 100), entry};
        HfTensor tensor{
            .name = name,
            .dtype = fields.get<std::string>("dtype"),
            .shape = fields.get<std::vector<int64_t>>("shape"),
        };
        tensor.bytes = bytes_of(tensor);
        const auto range = fields.get<std::vector<int64_t>>("data_offsets");
        if (range.size() != 2 || tensor.bytes < 0 || range[1] - range[0] != tensor.bytes ||
            range[1] > tensors_bytes)
            fields.reject("data_offsets", "a range in the file, of as many bytes as dtype and shape say");
        tensor.data = tensors + range[0];
        if (!tensors_.emplace(name, tensor).second)
            throw Error(path, " has tensor ", name,
                        ", which another file model*.safetensors also has; download the folder again.");
        ranges.emplace_back(range[0], range[1]);
    }
    // No byte belongs to two tensors, or to none.
    std::sort(ranges.begin(), ranges.end());
    int64_t end = 0;
    for (const auto& [first, after] : ranges) {
        require_whole(first == end);
        end = after;
    }
    require_whole(end == tensors_bytes);
}

const HfTensor& Safetensors::find_tensor(const std::string& name, const std::vector<int64_t>& shape,
                                         const std::string& dtypes) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end() || found->second.shape != shape || !is_one_of(dtypes, found->second.dtype))
        throw Error(path_, " has no tensor ", name, " of shape ", json(shape).dump(), " in ", dtypes,
                    "; it belongs to another model or run, or must be downloaded again.");
    return found->second;
}

// The outer object is written by hand, because adding a field to an ordered_json takes time in proportion to
// the number of its fields.
std::string safetensors_header(const std::vector<HfTensor>& tensors) {
    std::string text = R"({"__metadata__":{"format":"pt"})";  // transformers needs this format
    int64_t end = 0;
    for (const HfTensor& tensor : tensors) {
        const int64_t begin = end;
        end += bytes_of(tensor);
        const ordered_json entry = {
            {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, end}}};
        text += "," + json(tensor.name).dump() + ":" + entry.dump();
    }
    text += "}";
    text.resize(round_up(text.size(), 8), ' ');  // spaces, so that the tensors are aligned to 8 bytes
    const uint64_t length = text.size();
    return std::string(reinterpret_cast<const char*>(&length), sizeof length) + text;
}

}  // namespace coat

// data/safetensors.cpp - files, JSON and safetensors, read and written (safetensors.h).
#include "safetensors.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <new>
#include <set>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../coat.h"

namespace coat {

MappedFile::MappedFile(const std::string& path) : path_(path) {
    const int file =
        ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe would wait for a writer
    struct stat status {};
    const bool found = file >= 0 && ::fstat(file, &status) == 0;
    const bool regular = S_ISREG(status.st_mode);
    bytes_ = status.st_size;
    device_ = status.st_dev;
    number_ = status.st_ino;
    if (found && regular && bytes_) memory_ = ::mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, file, 0);
    const int error = errno;
    if (file >= 0) ::close(file);
    if (memory_ == MAP_FAILED && error == ENOMEM) throw std::bad_alloc();
    if (found && regular && memory_ != MAP_FAILED) return;
    const std::string why = found && !regular ? "it is not a regular file" : std::strerror(error);
    throw Error("Cannot read ", path, " (", why, "); check path and permissions.");
}

void MappedFile::require_whole() const {
    struct stat status {};
    if (::stat(path_.c_str(), &status) != 0) return;  // it was removed, and stays as long as it is mapped
    const bool same = status.st_dev == device_ && status.st_ino == number_;
    if (same && status.st_size < bytes_)
        throw Error(path_, " became shorter while it was in use; restore the file.");
}

MappedFile::~MappedFile() {
    if (memory_) ::munmap(memory_, bytes_);
}

uint64_t hash_bytes(const void* data, int64_t bytes, uint64_t hash) {
    for (int64_t at = 0; at < bytes; at += 8) {
        uint64_t word = 0;
        std::memcpy(&word, static_cast<const char*>(data) + at, std::min<int64_t>(8, bytes - at));
        hash = (hash ^ word) * 0x9E3779B97F4A7C15u;  // both steps are bijections
        hash ^= hash >> 32;
    }
    return hash;
}

// Each MiB has a hash that begins with its place, so that all threads work and the order counts.
uint64_t hash_of(const MappedFile& file) {
    constexpr int64_t PART = 1 << 20;
    uint64_t hash = file.bytes();
#pragma omp parallel for reduction(^ : hash)
    for (int64_t at = 0; at < file.bytes(); at += PART)
        hash ^= hash_bytes(file.data() + at, std::min(PART, file.bytes() - at), at);
    return hash;
}

std::string hash_file(const std::string& path) { return std::to_string(hash_of(MappedFile(path))); }

void finish(std::ofstream& file, const std::string& path) {
    file.close();
    if (!file)
        throw Error("Cannot write ", path,
                    "; the disk may be full: free some space, or give another folder with --out.");
    sync(path);
}

void save_file(const std::string& path, const std::string& bytes) {
    std::ofstream file(path, std::ios::binary);
    file << bytes;
    finish(file, path);
}

// Some file systems cannot sync a folder and return EINVAL; that is no error.
void sync(const std::string& path) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    const bool ok = file >= 0 && (::fsync(file) == 0 || errno == EINVAL);
    const std::string why = std::strerror(errno);
    if (file >= 0) ::close(file);
    if (!ok) throw Error("Cannot sync ", path, " (", why, "); check the disk, or give another --out.");
}

void Fields::reject(const std::string& field, const std::string& expected) const {
    const std::string found = has(field) ? object[field].dump().substr(0, 100) : "missing";
    throw Error(path, ": the field ", field.substr(0, 100), " must be ", expected, ", but it is ", found,
                "; correct it, or download or save the file again.");
}

// The library parses nested values iteratively, but prints and copies them recursively, and its values take
// many times the memory of the text. So depth and size are limited before it parses.
static Fields parse_json(const std::string& path, std::string_view text) {
    constexpr int MAX_DEPTH = 32;
    constexpr size_t MAX_BYTES = 32 << 20;
    auto require = [&](bool ok, const char* expected) {
        if (!ok) throw Error(path, " is not a JSON object ", expected, "; download or save it again.");
    };
    require(text.size() <= MAX_BYTES, "of at most 32 MiB");
    int depth = 0;
    bool in_string = false;
    for (size_t i = 0; i < text.size(); i++) {
        if (text[i] == '"') in_string = !in_string;
        if (in_string) i += text[i] == '\\';  // skip the escaped character
        else depth += (text[i] == '{' || text[i] == '[') - (text[i] == '}' || text[i] == ']');
        require(depth <= MAX_DEPTH, "of at most 32 levels");
    }
    json value = json::parse(text, nullptr, /*allow_exceptions=*/false);
    require(value.is_object() && text.find('\0') == text.npos, "in whole");
    return {path, std::move(value)};
}

Fields read_json(const std::string& path) {
    const MappedFile file(path);
    return parse_json(path, file.text());
}

// Bytes of a tensor; -1 if its dtype is unknown or the product overflows. The number in a dtype is its bits.
static int64_t bytes_of(const Tensor& t) {
    const size_t digits = t.dtype.find_first_of("0123456789");
    const int bits = t.dtype == "BOOL" ? 8 : digits == std::string::npos ? 0 : std::atoi(&t.dtype[digits]);
    int64_t bytes = bits == 8 || bits == 16 || bits == 32 || bits == 64 ? bits / 8 : -1;
    for (int64_t n : t.shape)
        if (bytes < 0 || __builtin_mul_overflow(bytes, n, &bytes)) return -1;
    return bytes;
}

// The files that an index names: {"weight_map": {name of a tensor: name of a file}}. What is in which file,
// their headers say. An index may come from anywhere: only files of its own folder are read.
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
    if (fs::exists(index)) files = files_of_index(index);  // also read where it is not used: it may be wrong
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
    auto require = [&](bool ok) {
        if (!ok) throw Error(path, " is not a whole safetensors file; download it again, or give another.");
    };
    uint64_t length = 0;
    require(file.bytes() >= 8);
    std::memcpy(&length, file.data(), 8);
    require(length <= uint64_t(file.bytes()) - 8);
    const uint8_t* const start = file.data() + 8 + length;
    const int64_t room = file.bytes() - 8 - int64_t(length);
    std::vector<std::pair<int64_t, int64_t>> ranges;
    Fields header = parse_json(path, file.text().substr(8, length));
    header.object.erase("__metadata__");
    for (const auto& [name, entry] : header.object.items()) {
        const Fields f{path + ", tensor " + name.substr(0, 100), entry};
        Tensor t{name, f.get<std::string>("dtype"), f.get<std::vector<int64_t>>("shape")};
        const auto range = f.get<std::vector<int64_t>>("data_offsets");
        t.bytes = bytes_of(t);
        if (range.size() != 2 || t.bytes < 0 || range[1] - range[0] != t.bytes || range[1] > room)
            f.reject("data_offsets", "a range in the file, of as many bytes as dtype and shape say");
        t.data = start + range[0];
        if (!tensors_.emplace(name, t).second)
            throw Error(path, " has tensor ", name,
                        ", which another file model*.safetensors also has; download the folder again.");
        ranges.emplace_back(range[0], range[1]);
    }
    std::sort(ranges.begin(), ranges.end());
    int64_t end = 0;  // no byte belongs to two tensors or to none
    for (const auto& [from, to] : ranges) require(from == end), end = to;
    require(end == room);
}

const Tensor& Safetensors::require(const std::string& name, const std::vector<int64_t>& shape,
                                   const std::string& dtypes) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end() || found->second.shape != shape || !is_one_of(dtypes, found->second.dtype))
        throw Error(path_, " has no tensor ", name, " of shape ", json(shape).dump(), " in ", dtypes,
                    "; it belongs to another model or run, or must be downloaded again.");
    return found->second;
}

// The outer object is written by hand: adding to an ordered_json takes quadratic time.
std::string safetensors_header(const std::vector<Tensor>& tensors) {
    std::string text = R"({"__metadata__":{"format":"pt"})";  // transformers needs the format
    int64_t end = 0;
    for (const Tensor& t : tensors) {
        const int64_t begin = end;
        end += bytes_of(t);
        const ordered_json entry = {{"dtype", t.dtype}, {"shape", t.shape}, {"data_offsets", {begin, end}}};
        text += "," + json(t.name).dump() + ":" + entry.dump();
    }
    text += "}";
    text.resize(round_up(text.size(), 8), ' ');  // aligns the tensors to 8
    const uint64_t length = text.size();
    return std::string(reinterpret_cast<const char*>(&length), sizeof length) + text;
}

}  // namespace coat

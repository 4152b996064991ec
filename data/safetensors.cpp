// data/safetensors.cpp - files, JSON and safetensors, read and written (safetensors.h).
#include "safetensors.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../coat.h"

namespace coat {

using nlohmann::json;

MappedFile::MappedFile(const std::string& path) : path_(path) {
    file_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe would wait for a writer
    struct stat status {};
    const bool found = file_ >= 0 && ::fstat(file_, &status) == 0, regular = S_ISREG(status.st_mode);
    bytes_ = status.st_size;
    if (found && regular && bytes_) memory_ = ::mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, file_, 0);
    const std::string why = found && !regular ? "it is not a regular file" : std::strerror(errno);
    if (found && regular && memory_ != MAP_FAILED) return;
    if (file_ >= 0) ::close(file_);
    throw Error("Cannot read ", path, " (", why, "); check path and permissions.");
}

void MappedFile::require_whole() const {
    struct stat status {};
    if (::fstat(file_, &status) == 0 && status.st_size < bytes_)
        throw Error(path_, " became shorter while it was in use; restore the file.");
}

MappedFile::~MappedFile() {
    ::close(file_);
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
std::string hash_file(const std::string& path) {
    constexpr int64_t PART = 1 << 20;
    const MappedFile file(path);
    auto hash = uint64_t(file.bytes());
#pragma omp parallel for reduction(^ : hash)
    for (int64_t at = 0; at < file.bytes(); at += PART)
        hash ^= hash_bytes(file.data() + at, std::min(PART, file.bytes() - at), uint64_t(at));
    return std::to_string(hash);
}

OutputFile::OutputFile(const std::string& path) : path_(path), file_(std::fopen(path.c_str(), "wbe")) {
    if (!file_) fail();
}

OutputFile::~OutputFile() {
    if (file_) std::fclose(file_);
}

void OutputFile::fail() const {
    throw Error("Cannot write ", path_, " (", std::strerror(errno),
                "); free some space, or give another folder with --out.");
}

void OutputFile::write(const void* data, int64_t bytes) {
    if (std::fwrite(data, 1, bytes, file_) != size_t(bytes)) fail();
}

void OutputFile::finish() {
    if (std::fflush(file_) || ::fsync(::fileno(file_))) fail();
}

void write_file(const std::string& path, const std::string& bytes) {
    OutputFile file(path);
    file.write(bytes.data(), int64_t(bytes.size()));
    file.finish();
}

// Some file systems cannot sync a folder and return EINVAL; that is no error.
void sync_folder(const std::string& folder) {
    const int file = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const bool ok = file >= 0 && (::fsync(file) == 0 || errno == EINVAL);
    const std::string why = std::strerror(errno);
    if (file >= 0) ::close(file);
    if (!ok) throw Error("Cannot sync ", folder, " (", why, "); check the disk, or give another --out.");
}

void Fields::reject(const std::string& field, const std::string& expected) const {
    const std::string found = has(field) ? object[field].dump().substr(0, 100) : "missing";
    throw Error(path, ": the field ", field.substr(0, 100), " must be ", expected, ", but it is ", found,
                "; correct it, or download or save the file again.");
}

// The library parses nested values iteratively, but prints and copies them recursively, and its values take
// many times the memory of the text. So depth and size are limited before it parses.
Fields parse_json(const std::string& path, const void* data, int64_t bytes) {
    constexpr int MAX_DEPTH = 32;
    constexpr int64_t MAX_BYTES = 32 << 20;
    const char* text = static_cast<const char*>(data);
    int depth = 0, deepest = 0;
    bool in_string = false;
    for (int64_t i = 0; i < bytes && bytes <= MAX_BYTES; i++) {
        if (text[i] == '"') in_string = !in_string;
        if (in_string) i += text[i] == '\\';  // skip the escaped character
        else if (text[i] == '{' || text[i] == '[') deepest = std::max(deepest, ++depth);
        else if (text[i] == '}' || text[i] == ']') depth--;
    }
    auto require = [&](bool ok, const char* expected) {
        if (!ok) throw Error(path, " is not a JSON object ", expected, "; download or save it again.");
    };
    require(bytes <= MAX_BYTES, "of at most 32 MiB");
    require(deepest <= MAX_DEPTH, "of at most 32 levels");
    // The library takes a zero byte for the end of the text.
    const bool zero = bytes && std::memchr(text, 0, bytes);
    json value = zero ? json() : json::parse(text, text + bytes, nullptr, /*allow_exceptions=*/false);
    require(value.is_object(), "in whole");
    return {path, std::move(value)};
}

Fields read_json(const std::string& path) {
    const MappedFile file(path);
    return parse_json(path, file.data(), file.bytes());
}

// Bytes of a tensor; -1 if its dtype is unknown or the product overflows. The number in a dtype is its bits.
static int64_t bytes_of(const TensorInfo& t) {
    const size_t digits = t.dtype.find_first_of("0123456789");
    const int bits = t.dtype == "BOOL" ? 8 : digits == std::string::npos ? 0 : std::atoi(&t.dtype[digits]);
    int64_t bytes = bits == 8 || bits == 16 || bits == 32 || bits == 64 ? bits / 8 : -1;
    for (int64_t n : t.shape)
        if (bytes < 0 || __builtin_mul_overflow(bytes, n, &bytes)) return -1;
    return bytes;
}

// Compares all of the header with the file, so that users of a tensor need no checks of their own.
Safetensors::Safetensors(const std::string& path) : file_(path) {
    auto require = [&](bool ok) {
        if (!ok) throw Error(path, " is not a whole safetensors file; download it again, or give another.");
    };
    uint64_t length = 0;
    require(file_.bytes() >= 8);
    std::memcpy(&length, file_.data(), 8);
    require(length <= uint64_t(file_.bytes()) - 8);
    const uint8_t* start = file_.data() + 8 + length;
    Fields header = parse_json(path, file_.data() + 8, int64_t(length));
    header.object.erase("__metadata__");
    int64_t left = file_.bytes() - 8 - int64_t(length);
    for (const auto& [name, entry] : header.object.items()) {
        const Fields f{path + ", tensor " + name.substr(0, 100), entry};
        const TensorInfo info{name, f.get<std::string>("dtype"), f.get<std::vector<int64_t>>("shape")};
        const auto range = f.get<std::vector<int64_t>>("data_offsets");
        const int64_t bytes = bytes_of(info);
        if (range.size() != 2 || bytes < 0 || range[1] - range[0] != bytes)
            f.reject("data_offsets", "a range of as many bytes as dtype and shape say");
        require(range[1] <= file_.bytes() - 8 - int64_t(length));
        tensors_[name] = {info, start + range[0], bytes};
        left -= bytes;
    }
    require(left == 0);  // no byte belongs to two tensors or to none
}

const Tensor& Safetensors::require(const std::string& name, const std::vector<int64_t>& shape,
                                   const std::string& dtype) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end() || found->second.shape != shape ||
        (!dtype.empty() && found->second.dtype != dtype))
        throw Error(path(), " has no tensor ", name, " of shape ", json(shape).dump(), " ", dtype,
                    "; it belongs to another model or run.");
    return found->second;
}

// All offsets follow from the table, so the header is complete before the first byte of a tensor. The outer
// object is written by hand: adding to an ordered_json takes quadratic time.
SafetensorsWriter::SafetensorsWriter(const std::string& path, const std::vector<TensorInfo>& tensors)
    : file_(path) {
    std::string text = R"({"__metadata__":{"format":"pt"})";  // transformers needs the format
    for (const TensorInfo& t : tensors) {
        const int64_t end = left_ + bytes_of(t);
        const nlohmann::ordered_json entry = {
            {"dtype", t.dtype}, {"shape", t.shape}, {"data_offsets", {left_, end}}};
        text += "," + json(t.name).dump() + ":" + entry.dump();
        left_ = end;
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

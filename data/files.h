// data/files.h - files that are read as memory, or written and synced (files.cpp).
#pragma once
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "../common/text.h"

namespace coat {

namespace fs = std::filesystem;

// The folder of a file, which may also be the working directory: "FOLDER/." or ".".
inline std::string folder_of(const std::string& file) {
    return (fs::path(file).parent_path() / ".").string();
}
inline std::string path_in(const std::string& folder, const std::string& file) {
    return (fs::path(folder) / file).string();
}

// A whole file as memory, read only. Pages are read when they are touched, so the file may be larger than
// memory. The file is not kept open, because a run may have thousands of files. If it has become shorter,
// touching a page that is no longer there ends the program.
class MappedFile {
public:
    // Error if the file cannot be read; std::bad_alloc if there is no room for it among the addresses.
    explicit MappedFile(const std::string& path);
    MappedFile(const MappedFile&) = delete;
    ~MappedFile();
    const uint8_t* data() const { return static_cast<const uint8_t*>(memory_); }  // null if the file is empty
    int64_t bytes() const { return bytes_; }
    std::string_view text() const { return {static_cast<const char*>(memory_), size_t(bytes_)}; }
    // Copies bytes from a place in data(). Error if they cannot be read, or if the file has become shorter.
    // (Reading data() itself would then end the program.)
    void copy(const uint8_t* from, int64_t bytes, uint8_t* to) const;

private:
    const std::string path_;
    void* memory_ = nullptr;
    int64_t bytes_ = 0;
    uint64_t device_ = 0, number_ = 0;  // identify the file, even when another one takes its name
};

// The hash of some bytes, which follow bytes that have the given hash. A change in one word of 8 bytes always
// changes the result.
uint64_t hash_bytes(const void* data, int64_t bytes, uint64_t hash);
uint64_t hash_of(const MappedFile& file);
std::string hash_file(const std::string& path);  // the hash of the file, as a decimal number

// Closes a file and waits until it is on the disk. Error if this or any write to the file has failed: so
// callers need not check their writes.
void close_and_sync(std::ofstream& file, const std::string& path);
void save_file(const std::string& path, const std::string& bytes);  // writes, closes and syncs a file

// Waits until a file, or the names in a folder, are on the disk: from then on a new name survives a power
// failure.
void sync(const std::string& path);

}  // namespace coat

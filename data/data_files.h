// data/data_files.h - the files of --data (data_files.cpp): which there are, which of them are text, which
// are left out and why, and how they differ from those of an earlier run.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace coat {

// A file or a folder that is not used, and why, as the end of a sentence: "has a NUL byte at byte 7".
struct LeftOut {
    std::string path, reason;
};
// Sentences for the user. They name the first ten files, and say how many more there are.
std::vector<std::string> sentences_of(const std::vector<LeftOut>& left_out);

struct FoundFiles {
    std::vector<std::string> paths;  // each file once, the files of a folder in the byte order of their paths
    size_t held_out_count = 0;       // this many of them, the first, are those of --val
    std::vector<LeftOut> left_out;
};
// The files of --data and --val.
//   data, val   files and folders, separated by commas. A folder stands for its token files (*.bin). If there
//               are none, it stands for all files below it, without hidden files and those of models and
//               checkpoints. Links are followed. A file that both name is one of --val
//   written     files and folders that the run itself writes: they are no data
// Error if --data or --val names a file that can be neither text nor tokens.
FoundFiles find_data_files(const std::string& data, const std::vector<std::string>& written,
                           const std::string& val = "");
bool is_token_file(const std::string& path);

// Why the bytes of a file are no text, as the end of a sentence; empty if they are text: UTF-8 without NUL.
// data/records.py has the same rule.
std::string why_not_text(std::string_view bytes);
// The length of the longest beginning that is valid UTF-8.
size_t utf8_length(std::string_view bytes);

// A file of the data that was read.
struct DataFile {
    std::string path;
    int64_t bytes;
    uint64_t hash;  // of its bytes

    // The file as a checkpoint keeps it, "BYTES HASH PATH", and back. JSON is UTF-8, so bytes of a path that
    // are not UTF-8 are replaced by U+FFFD.
    std::string line() const;
    static DataFile from_line(const std::string& line);
};
std::string utf8_path(const std::string& path);  // the path as in line()

// The first difference between the files of an earlier run and those of now, such as "a.txt is missing";
// empty if there is none.
std::string difference(const std::vector<DataFile>& before, const std::vector<DataFile>& now);

}  // namespace coat

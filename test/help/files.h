// files.h - temporary folders, contents of files, and errors: what every test of reading and writing needs.
#pragma once
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <vector>
#include <unistd.h>

#include "../../data/tokens.h"
#include "../../common/text.h"

namespace coat::test {

namespace fs = std::filesystem;

inline std::string read_file(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

// Replaces the file. It is removed first, because ext4 waits for the disk when a file is truncated.
inline void write_file(const fs::path& path, const std::string& bytes) {
    fs::remove(path);
    std::ofstream(path, std::ios::binary) << bytes;
}

// Path in the folder -> bytes.
inline std::map<std::string, std::string> files_below(const fs::path& folder) {
    std::map<std::string, std::string> all;
    for (const auto& file : fs::recursive_directory_iterator(folder))
        if (file.is_regular_file()) all[fs::relative(file.path(), folder).string()] = read_file(file.path());
    return all;
}
// Likewise, with an entry "path/" for each empty folder.
inline std::map<std::string, std::string> everything_below(const fs::path& folder) {
    std::map<std::string, std::string> all = files_below(folder);
    for (const auto& entry : fs::recursive_directory_iterator(folder))
        if (entry.is_directory() && fs::is_empty(entry.path()))
            all[fs::relative(entry.path(), folder).string() + "/"] = "";
    return all;
}

inline bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

// A reader has solved exercises, so that their bodies are empty no longer.
inline bool exercises_are_solved() {
    static const bool changed = std::system("git diff --quiet HEAD -- dev/exercises 2>/dev/null") == 1 << 8;
    return changed;
}

// An empty folder that is removed when the test ends.
struct Folder {
    fs::path path;
    Folder() {
        std::string name = (fs::temp_directory_path() / "coat-test-XXXXXX").string();
        REQUIRE(mkdtemp(name.data()) != nullptr);
        path = name;
    }
    ~Folder() {
        std::error_code ignored;
        fs::remove_all(path, ignored);
    }
    Folder(const Folder&) = delete;

    operator std::string() const { return path.string(); }
    std::string operator/(const std::string& name) const { return (path / name).string(); }
    std::string write(const std::string& name, const std::string& bytes) const {
        fs::create_directories((path / name).parent_path());
        write_file(path / name, bytes);
        return *this / name;
    }
    std::map<std::string, std::string> files() const { return files_below(path); }
};

// The text of the Error that the action throws; "" if it throws none. Any other exception fails the test.
using Action = std::function<void()>;
inline std::string error_of(const Action& action) {
    try {
        action();
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}

inline std::vector<std::string> lines_of(const std::string& text) {
    std::vector<std::string> lines;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    return lines;
}

// The parts of a text between semicolons.
inline std::vector<std::string> rows_of(const std::string& text) {
    std::vector<std::string> rows;
    std::istringstream in(text);
    for (std::string row; std::getline(in >> std::ws, row, ';');) rows.push_back(row);
    return rows;
}

// An error message is one line of plain ASCII of a reasonable length, contains `who` and `what`, and ends
// with a full stop. Plain means no control characters and no bidirectional overrides.
inline void check_error(const std::string& message, const std::string& who, const std::string& what = "") {
    CAPTURE(message.substr(0, 5000));
    CHECK(contains(message, who));
    CHECK(contains(message, what));
    CHECK(std::all_of(message.begin(), message.end(), [](char c) { return c >= 32 && c < 127; }));
    CHECK(message.size() < 2000);
    CHECK((!message.empty() && message.back() == '.'));
}
inline void check_error(const Action& action, const std::string& who, const std::string& what = "") {
    check_error(error_of(action), who, what);
}

// Token files, tokenizer files and token streams.
using Tokens = std::vector<int32_t>;
inline Tokens tokens_of(const TokenStream& stream) {
    Tokens tokens(stream.size()), targets(stream.size());
    stream.read(0, stream.size(), tokens.data(), targets.data());
    return tokens;
}
template <class Token> TokenStream stream_of(const std::vector<Token>& tokens) {
    const auto memory = std::make_shared<const std::vector<Token>>(tokens);
    TokenStream stream;
    const auto* bytes = reinterpret_cast<const uint8_t*>(memory->data());
    stream.append({memory, bytes, sizeof(Token), int64_t(tokens.size())});
    return stream;
}

// The header of llm.c's files: 256 words, of which the first few mean something.
inline std::string file_header(std::vector<int32_t> words) {
    words.resize(256);
    return {reinterpret_cast<const char*>(words.data()), 1024};
}
template <class Token>
std::string token_file(const std::vector<Token>& tokens, int32_t seq = 0, int32_t version = 1) {
    const int32_t magic = sizeof(Token) == 2 ? 20240520 : 20240801;
    return file_header({magic, version, int32_t(tokens.size()), seq})
        .append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(Token));
}
// end: the token that ends a text; -1: a file of version 1, which has none.
inline std::string tokenizer_file(const std::vector<std::string>& pieces, int32_t end = -1) {
    std::string file = file_header({20240328, end < 0 ? 1 : 2, int32_t(pieces.size()), end});
    for (const std::string& piece : pieces) file += char(piece.size()) + piece;
    return file;
}

// Tests of Python programs are skipped where Python is missing (apt-get install python3), and those that need
// NumPy where that is (python3-numpy).
inline const bool NO_PYTHON = std::system("python3 --version >/dev/null 2>&1") != 0;
inline const bool NO_NUMPY = std::system("python3 -c 'import numpy' >/dev/null 2>&1") != 0;

}  // namespace coat::test

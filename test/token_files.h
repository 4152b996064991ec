// token_files.h - token files and token streams, shared by the tests of data/tokens.cpp.
#pragma once
#include <doctest/doctest.h>

#include <stdlib.h>
#include <filesystem>
#include <fstream>

#include "../coat.h"
#include "../data/tokens.h"
#include "random.h"

namespace coat::test::token_files {

namespace fs = std::filesystem;

struct Folder {  // removed when the test ends
    fs::path path;
    Folder() {
        std::string name = (fs::temp_directory_path() / "coat-tokens-XXXXXX").string();
        REQUIRE(mkdtemp(name.data()));
        path = name;
    }
    ~Folder() {
        std::error_code ignored;
        fs::remove_all(path, ignored);
    }
    std::string write(const std::string& name, const std::string& content) const {
        fs::create_directories((path / name).parent_path());
        std::ofstream(path / name, std::ios::binary) << content;
        return (path / name).string();
    }
};

inline std::vector<int32_t> tokens_of(const TokenStream& stream) {
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < stream.size(); i++) tokens.push_back(stream[i]);
    return tokens;
}

template <class Token>
std::string token_file(const std::vector<Token>& tokens, int32_t version = 1) {
    int32_t header[256] = {sizeof(Token) == 2 ? 20240520 : 20240801, version,
                           static_cast<int32_t>(tokens.size())};
    std::string file(reinterpret_cast<const char*>(header), sizeof header);
    return file.append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(Token));
}

inline std::string table(const std::string& pieces, const std::string& size) {
    return R"({"format": "coat vocabulary", "version": 1, "size": )" + size + R"(, "pieces": )" + pieces +
           "}";
}

// The action is refused with one sentence that names the culprit and ends as a sentence does.
template <class Action>
void check_refused(const Action& action, const std::string& names) {
    std::string said;
    try {
        action();
    } catch (const Error& error) {
        said = error.what();
    }
    CHECK_MESSAGE(said.find(names) != std::string::npos,
                  "said \"" << said << "\", which does not name " << names);
    CHECK_MESSAGE((!said.empty() && said.back() == '.' && said.find('\n') == std::string::npos), said);
}

inline void check_data_refused(const std::string& data, const std::string& names) {
    INFO("--data ", data);
    check_refused([&] { load_corpus(data); }, names);
}

}  // namespace coat::test::token_files

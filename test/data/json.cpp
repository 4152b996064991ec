// json.cpp - data/json.cpp reads an object of JSON from a file; files that are too deep or too large, or no
// files, are errors.
#include <sys/stat.h>

#include "../help/checkpoints.h"

using namespace coat;
using namespace coat::test;

static std::string nested(int levels) {  // {"a": [[...]]}
    return "{\"a\":" + std::string(levels - 1, '[') + std::string(levels - 1, ']') + "}";
}

TEST_CASE("read_json: limits of depth and size; brackets in strings do not count") {
    Folder folder;
    auto read = [&](const std::string& text) { return read_json(folder.write("a.json", text)).object; };
    CHECK(read(nested(32)).contains("a"));
    for (const std::string& bad : {nested(33), nested(1'000'000), "{\"b\": []," + nested(33).substr(1)})
        check_error([&] { read(bad); }, "a.json", "32 levels");
    check_error([&] { read("{\"a\":\"" + std::string(32 << 20, 'x') + "\"}"); }, "a.json", "32 MiB");
    std::string many = "{\"b\": [";  // brackets that are closed do not count either
    for (int i = 0; i < 1000; i++) many += "[],";
    CHECK(read(many + "1]}").size() == 1);
    const std::string open(1000, '[');
    CHECK(read("{\"a\": \"" + open + "\\\"" + open + "\\\\\"}").at("a") == open + "\"" + open + "\\");
    for (const char* bad : {"", "[1]", "{\"a\":1"}) check_error([&] { read(bad); }, "a.json");
    check_error([&] { read(std::string("{}\0x", 4)); }, "a.json");
    check_error([&] { read_json(folder / "none"); }, folder / "none", "No such file");
    check_error([&] { read_json(folder); }, folder, "not a regular file");
    REQUIRE(::mkfifo((folder / "pipe").c_str(), 0600) == 0);
    check_error([&] { read_json(folder / "pipe"); }, folder / "pipe", "not a regular file");
}

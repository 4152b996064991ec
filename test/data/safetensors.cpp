// safetensors.cpp - what data/safetensors.cpp writes is read back; wrong or hostile files are errors.
#include <doctest/doctest.h>

#include <cstring>

#include "../help/checkpoints.h"

using namespace coat;
using namespace coat::test;

// A safetensors file with this header, and as many bytes after it.
static std::string raw_file(const std::string& header, size_t bytes = 0) {
    const uint64_t length = header.size();
    return std::string(reinterpret_cast<const char*>(&length), 8) + header + std::string(bytes, 'd');
}
TEST_CASE("Safetensors: reads back what was written; every tensor is where the header says") {
    Folder folder;
    const std::string path = folder / "a.safetensors";
    const std::vector<HfTensor> tensors = {{"x", "F32", {2, 3}},
                                           {"empty", "I64", {0, 5}},
                                           {"scalar", "BF16", {}},
                                           {"codes \"q\"", "F8_E4M3", {7}}};
    const std::vector<std::string> bytes = {std::string(24, 'x'), "", "ab", "1234567"};
    save_file(path, safetensors_header(tensors) + bytes[0] + bytes[1] + bytes[2] + bytes[3]);
    const std::string whole = read_file(path);
    CHECK(whole.find(R"({"__metadata__":{"format":"pt"},)") == 8);  // transformers requires it
    uint64_t length;
    std::memcpy(&length, whole.data(), 8);
    CHECK(length % 8 == 0);
    const Safetensors file(path);
    REQUIRE(file.tensors().size() == tensors.size());
    for (size_t i = 0; i < tensors.size(); i++) {
        const HfTensor& t = file.find_tensor(tensors[i].name, tensors[i].shape, tensors[i].dtype);
        CHECK(std::string(reinterpret_cast<const char*>(t.data), size_t(t.bytes)) == bytes[i]);
    }
    file.find_tensor("x", {2, 3}, "BF16 F32");
    check_error([&] { file.find_tensor("y", {2, 3}, "F32"); }, path, "y");
    check_error([&] { file.find_tensor("x", {3, 2}, "F32"); }, path, "[3,2]");
    check_error([&] { file.find_tensor("x", {2, 3}, "BF16"); }, path, "BF16");
}

TEST_CASE("Safetensors: a wrong header is an error that names the file") {
    auto entry = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
        return "{\"dtype\":" + dtype + ",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
    };
    const std::string a = "{\"a\":" + entry("\"F32\"", "[2]", "[0,8]"), b = entry("\"U8\"", "[4]", "[8,12]"),
                      good = a + ",\"b\":" + b + "}";
    std::string huge = raw_file(good, 12), endless = huge;
    huge[4] = '\1';
    endless.replace(0, 8, 8, '\xFF');  // headers of 4 GB and of 2^64 - 1 bytes
    std::vector<std::string> wrong = {huge, endless, raw_file(good + "  ").substr(0, good.size() + 9)};
    for (const size_t size : {0, 7, 40}) wrong.push_back(raw_file(good, 12).substr(0, size));
    for (const size_t bytes : {0, 11, 13}) wrong.push_back(raw_file(good, bytes));
    for (const char* text :
         {"", "{", "{\"\xFF\":1}", "{}{}", "[]", "7", "{\"a\":3}", R"({"a":{"a":{"a":{}}}})"})
        wrong.push_back(raw_file(text));
    // Entries of a before a good b, and of b after a good a: holes and overlaps, other bytes than dtype and
    // shape say, values of other kinds, and sizes beyond 64 bits or back in them.
    std::istringstream rows(R"(
a "U8" [7] [0,7]     a "U8" [7] [1,8]    b "U8" [8] [4,12]   b "F32" [2] [0,8]  a "F32" [3] [0,8]
a "F64" [2] [0,8]    a "F31" [2] [0,8]   a 4 [2] [0,8]       a "F32" [-2] [0,8] a "F32" [-2,-1] [0,8]
a "F32" [2.0] [0,8]  a "F32" 2 [0,8]     a "U8" [4] [8,4]    a "U8" [9] [-1,8]  a "U8" [8] [8]
a "U8" [8] [0,8,8]   a "U8" [8] null     a "F32" [99999999999999999999] [0,8]
a "F32" [1000000000000000,4611686018427387904] [0,8] a "F32" [2,2147418113,2147549185] [0,8])");  // 2^65 + 8
    for (std::string name, dtype, shape, offsets; rows >> name >> dtype >> shape >> offsets;)
        wrong.push_back(raw_file(name == "a" ? "{\"a\":" + entry(dtype, shape, offsets) + ",\"b\":" + b + "}"
                                             : a + ",\"b\":" + entry(dtype, shape, offsets) + "}",
                                 12));
    // Two that are wrong by as many bytes: in sum they fill the file.
    for (const auto& [first, second] :
         {std::pair(entry("\"F32\"", "[1]", "[0,8]"), entry("\"U8\"", "[8]", "[8,12]")),
          {entry("\"F32\"", "[1]", "[0,4]"), entry("\"U8\"", "[8]", "[0,8]")},
          {entry("\"F32\"", "[1]", "[0,4]"), entry("\"U8\"", "[8]", "[8,16]")}})
        wrong.push_back(raw_file("{\"a\":" + first + ",\"b\":" + second + "}", 12));
    Folder folder;
    folder.write("shards/model-1.safetensors", raw_file(good, 12));
    folder.write("shards/model-2.safetensors", raw_file(good, 12));
    check_error([&] { Safetensors file(folder / "shards"); }, folder / "shards/model-", "also has");
    const std::string path = folder / "wrong.safetensors";
    for (const std::string& bytes : wrong) {
        CAPTURE(bytes);
        write_file(path, bytes);
        check_error([&] { Safetensors file(path); }, path);
    }
    write_file(path, raw_file(good, 12));
    check_random_damage(path, good.size() + 20, cases(20000, 4000), [&] {
        int64_t sum = 0;
        const Safetensors file(path);
        for (const auto& [name, t] : file.tensors())  // every byte of a tensor can be read
            for (int64_t i = 0; i < t.bytes; i++) sum += t.data[i];
        CHECK(sum <= 255 * 12);
    });
}

TEST_CASE("Safetensors: the index of a folder names its files and a name that leads elsewhere is rejected") {
    auto file_of = [](const std::string& tensor) {
        return raw_file("{\"" + tensor + R"(":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 4);
    };
    Folder folder;
    const std::string path = folder / "shards", index = "shards/model.safetensors.index.json";
    folder.write("outside.safetensors", file_of("outside"));
    for (const char* name : {"model-1", "model-2", "model-old"})
        folder.write(concat("shards/", name, ".safetensors"), file_of(name));
    auto names = [&] {
        std::string all;
        const Safetensors file(path);
        for (const auto& [name, tensor] : file.tensors()) all += name + " ";
        return all;
    };
    CHECK(names() == "model-1 model-2 model-old ");
    folder.write(index, R"({"metadata": {"total_size": 8}, "weight_map":
        {"model-1": "model-1.safetensors", "model-2": "model-2.safetensors"}})");
    CHECK(names() == "model-1 model-2 ");
    const std::string outside = "\"" + folder / "outside.safetensors" + "\"";
    for (const std::string& value : std::vector<std::string>{
             outside, "\"../outside.safetensors\"", "\"sub/../../outside.safetensors\"", "\"..\"", "\".\"",
             "\"\"", "\"/\"", "\"sub/x.safetensors\"", "5", "null", "[\"model-1.safetensors\"]", "true",
             "\"config.json\"", R"("model-1.safetensors\u0000x.safetensors")"})
        // transformers prefers model.safetensors, but a wrong index is an error also beside that.
        for (const bool single : {false, true}) {
            CAPTURE(value);
            folder.write(index, R"({"weight_map": {"a": "model-1.safetensors", "b": )" + value + "}}");
            if (single) folder.write("shards/model.safetensors", file_of("single"));
            check_error([&] { names(); }, folder / index, "b");
            fs::remove(folder / "shards/model.safetensors");
        }
    for (const char* text : {"{}", "[]", "7", R"({"weight_map": 5})", R"({"weight_map": ["x"]})"}) {
        folder.write(index, text);
        check_error([&] { names(); }, folder / index);
    }
    folder.write(index, R"({"weight_map": {"a": "model-3.safetensors"}})");
    check_error([&] { names(); }, folder / "shards/model-3.safetensors", "No such file");
    folder.write("shards/model.safetensors", file_of("single"));
    CHECK(names() == "single ");
}

TEST_CASE("Fields: a value of another kind is rejected by file and field and what was expected") {
    const auto object =
        nlohmann::json::parse(R"({"n": 1000000000000000, "more": 1000000000000001, "minus": -1,
        "x": 0.5, "zero": 0, "huge": 1e300, "text": "t", "yes": true, "list": [0, 7], "bad": [1, -1],
        "in": {"a": 1}, "null": null})");
    const Fields f{"some/file.json", object};
    CHECK((f.get<int64_t>("n") == 1'000'000'000'000'000 && f.get<int64_t>("zero") == 0));
    CHECK((f.get<float>("x") == 0.5f && f.get<bool>("yes") && f.get<std::string>("text") == "t"));
    CHECK(f.get<std::vector<int64_t>>("list") == std::vector<int64_t>{0, 7});
    CHECK((f.get<int64_t>("null", 5) == 5 && !f.has("null") && f.get<Fields>("in").has("a")));
    auto rejected = [&](auto kind, const std::string& expected, std::initializer_list<const char*> fields) {
        for (const char* field : fields)
            check_error([&] { f.get<decltype(kind)>(field); }, concat("some/file.json: the field ", field),
                        "must be " + expected + ", but it is ");
    };
    rejected(int64_t(), "a whole number up to 10^15",
             {"more", "minus", "x", "text", "yes", "list", "null", "none"});
    rejected(float(), "a positive number", {"zero", "minus", "huge", "text", "null"});
    rejected(bool(), "true or false", {"n", "text", "null"});
    rejected(std::string(), "text", {"n", "list"});
    rejected(std::vector<int64_t>(), "a list of whole numbers up to 10^15", {"n", "bad", "in"});
    rejected(Fields(), "an object", {"n", "list", "null"});
}

TEST_CASE("hash_file: every byte of every MiB counts and so do the order of parts and the length") {
    Folder folder;
    SEEDED_RANDOM(rng);
    std::string bytes((3 << 20) + 5, '\0');
    for (char& b : bytes) b = char(rng.bits());
    auto hash = [&](const std::string& content) { return hash_file(folder.write("file", content)); };
    const std::string good = hash(bytes);
    CHECK(hash(bytes) == good);
    for (size_t part = 0; part <= bytes.size() >> 20; part++)
        for (const size_t at : {part << 20, std::min(bytes.size(), (part + 1) << 20) - 1}) {
            std::string changed = bytes;
            changed[at] ^= 1;
            CHECK(hash(changed) != good);
        }
    std::string swapped = bytes;
    std::rotate(swapped.begin(), swapped.begin() + (1 << 20), swapped.begin() + (2 << 20));
    for (const std::string& other : {swapped, bytes + '\0', bytes.substr(0, bytes.size() - 1)})
        CHECK(hash(other) != good);
    CHECK(hash(std::string(8, '\0')) != hash(std::string(16, '\0')));
}

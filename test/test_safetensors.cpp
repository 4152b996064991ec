// test_safetensors.cpp - data/safetensors.cpp: a file that is written is read back, and a wrong header is an
// error.
#include <doctest/doctest.h>

#include "model_files.h"

using namespace coat;
using namespace coat::test;
using namespace coat::test::model_files;

TEST_CASE("Safetensors: reads back names, types, shapes, bytes and metadata") {
    Folder folder;
    const std::string path = folder / "a.safetensors";
    const std::vector<TensorInfo> tensors = {{"x", "F32", {2, 3}},
                                             {"empty", "I64", {0, 5}},
                                             {"scalar", "BF16", {}},
                                             {"codes \"q\"", "F8_E4M3", {7}}};
    const std::vector<std::string> bytes = {std::string(24, 'x'), "", "ab", "1234567"};
    {
        SafetensorsWriter file(path, tensors);
        for (const std::string& b : bytes) file.write(b.data(), static_cast<int64_t>(b.size()));
        file.finish();
    }
    const Safetensors file(path);
    CHECK(read_file(path).find(R"({"__metadata__":{"format":"pt"},)") == 8);  // after the header's length
    REQUIRE(file.tensors().size() == tensors.size());
    for (size_t i = 0; i < tensors.size(); i++) {
        const Tensor* t = file.find(tensors[i].name);
        REQUIRE(t);
        CHECK(t->dtype == tensors[i].dtype);
        CHECK(t->shape == tensors[i].shape);
        CHECK(std::string(reinterpret_cast<const char*>(t->data), static_cast<size_t>(t->bytes)) == bytes[i]);
    }
    CHECK(file.find("y") == nullptr);
}

TEST_CASE("SafetensorsWriter: leaves no file when it is not finished") {
    Folder folder;
    const std::string path = folder / "a.safetensors";
    { SafetensorsWriter file(path, {{"x", "F32", {2}}}); }
    CHECK(!fs::exists(path));
    SafetensorsWriter file(path, {{"x", "F32", {2}}});
    CHECK_THROWS_AS(file.finish(), std::logic_error);
}

TEST_CASE("Safetensors: a wrong header is an error that names the file") {
    struct Case {
        const char* what;
        std::string bytes;
    };
    auto header = [](const std::string& a, const std::string& b) {
        return raw_file("{\"a\":" + a + ",\"b\":" + b + "}", 12);
    };
    const std::string a = R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
    const std::string b = R"({"dtype":"U8","shape":[4],"data_offsets":[8,12]})";
    const std::string good = "{\"a\":" + a + ",\"b\":" + b + "}";
    std::string huge = raw_file(good, 12), giant = huge, endless = huge;
    huge[4] = '\1', giant[3] = '\7', endless.replace(0, 8, 8, '\xFF');
    const std::vector<Case> cases = {
        {"empty", ""},
        {"shorter than a length", "1234567"},
        {"header beyond the file", raw_file(good, 0).substr(0, 40)},
        {"header of 4 GB", huge},
        {"header of more than 100 MB", giant},
        {"header of 2^64 - 1 bytes", endless},
        {"no header", raw_file("", 12)},
        {"not JSON", raw_file(good.substr(1), 12)},
        {"not UTF-8", raw_file("{\"\xFF\":1}", 0)},
        {"a zero byte", raw_file(std::string("{}\0", 3), 0)},
        {"more after its end", raw_file("{}{}", 0)},
        {"a list", raw_file("[]", 0)},
        {"a number", raw_file("7", 0)},
        {"deep nesting", raw_file("{\"a\":" + std::string(100000, '['), 0)},
        {"objects in objects", raw_file(R"({"a":{"a":{"a":{}}}})", 0)},
        {"data truncated", raw_file(good, 11)},
        {"data oversized", raw_file(good, 13)},
        {"the same name twice", raw_file("{\"a\":" + a + ",\"a\":" + a + "}", 8)},
        {"the same field twice",
         header(R"({"dtype":"F32","shape":[9],"shape":[2],"data_offsets":[0,8]})", b)},
        {"overlap", header(a, R"({"dtype":"U8","shape":[8],"data_offsets":[4,12]})")},
        {"the same bytes", header(a, R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})")},
        {"hole", header(R"({"dtype":"U8","shape":[7],"data_offsets":[0,7]})", b)},
        {"hole in front", header(R"({"dtype":"U8","shape":[7],"data_offsets":[1,8]})", b)},
        {"shape that is not its bytes", header(R"({"dtype":"F32","shape":[3],"data_offsets":[0,8]})", b)},
        {"dtype that is not its bytes", header(R"({"dtype":"F64","shape":[2],"data_offsets":[0,8]})", b)},
        {"unknown dtype", header(R"({"dtype":"F31","shape":[2],"data_offsets":[0,8]})", b)},
        {"dtype not text", header(R"({"dtype":4,"shape":[2],"data_offsets":[0,8]})", b)},
        {"negative size", header(R"({"dtype":"F32","shape":[-2],"data_offsets":[0,8]})", b)},
        {"two negative sizes", header(R"({"dtype":"F32","shape":[-2,-1],"data_offsets":[0,8]})", b)},
        {"fraction", header(R"({"dtype":"F32","shape":[2.0],"data_offsets":[0,8]})", b)},
        {"size that overflows",
         header(R"({"dtype":"F32","shape":[4611686018427387904,4611686018427387904],"data_offsets":[0,8]})",
                b)},
        {"size that wraps to its bytes",
         header(R"({"dtype":"F32","shape":[9223372036854775807,2],"data_offsets":[0,8]})", b)},
        {"size beyond 64 bits",
         header(R"({"dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,8]})", b)},
        {"shape not a list", header(R"({"dtype":"F32","shape":2,"data_offsets":[0,8]})", b)},
        {"end before begin", header(R"({"dtype":"U8","shape":[4],"data_offsets":[8,4]})", b)},
        {"negative begin", header(R"({"dtype":"U8","shape":[9],"data_offsets":[-1,8]})", b)},
        {"one offset", header(R"({"dtype":"U8","shape":[8],"data_offsets":[8]})", b)},
        {"three offsets", header(R"({"dtype":"U8","shape":[8],"data_offsets":[0,8,8]})", b)},
        {"no offsets", header(R"({"dtype":"U8","shape":[8]})", b)},
        {"tensor not an object", header("3", b)},
        {"metadata not text", raw_file(R"({"__metadata__":{"a":1}})", 0)},
        {"metadata not an object", raw_file(R"({"__metadata__":"a"})", 0)},
    };
    Folder folder;
    const std::string path = folder / "wrong.safetensors";
    write_file(path, raw_file(good, 12));
    CHECK(error_of([&] { Safetensors file(path); }) == "");
    for (const Case& c : cases) {
        CAPTURE(c.what);
        write_file(path, c.bytes);
        check_error([&] { Safetensors file(path); }, path);
    }
    write_file(path, giant);
    fs::resize_file(path, 200'000'000);  // as long as its header says, but sparse
    check_error([&] { Safetensors file(path); }, path, "100 MB");
    check_error([&] { Safetensors file(folder / "none"); }, folder / "none");
    check_error([&] { Safetensors file(folder.path.string()); }, folder.path.string());
}

// data/json.h - JSON files: parsed within limits, and their fields checked (json.cpp).
//
// config.json, an index of shards, a vocabulary or the header of a safetensors file may come from anywhere.
// What is wrong in one is an Error that names the file and the field.
#pragma once
#include <cmath>
#include <cstdint>
#include <string>
#include <nlohmann/json.hpp>

#include "../error.h"

namespace coat {

// The JSON object in a text. The JSON library parses nested values iteratively, but prints, copies and
// compares them recursively, and its objects take many times the memory of the text. So depth and number of
// values are limited before it parses. On success *why is empty; otherwise it says what is wrong ("is not a
// JSON object").
nlohmann::json parse_json(const void* text, int64_t bytes, std::string* why, int64_t max_values = 5'000'000);

nlohmann::json read_json(const std::string& path);  // Error if the file is not one JSON object
void write_json(const std::string& path, const nlohmann::ordered_json& value);  // and syncs it

// The fields of one JSON object. A field that is null counts as missing, as in Hugging Face's config.json.
struct Fields {
    std::string path;  // of the file, for errors
    nlohmann::json object;

    [[noreturn]] void reject(const std::string& field, const std::string& what) const {
        throw Error(path + ": field " + field + " " + what + ".");
    }
    static std::string excerpt(const nlohmann::json& value);
    bool has(const std::string& field) const { return object.contains(field) && !object[field].is_null(); }
    const nlohmann::json& at(const std::string& field) const {
        if (!has(field)) reject(field, "is missing; download or save the folder again");
        return object[field];
    }
    int64_t natural(const std::string& field) const {
        constexpr uint64_t MAX = 1'000'000'000'000'000;  // far below 2^63: sums do not overflow
        const nlohmann::json& value = at(field);
        if (!value.is_number_unsigned() || value.get<uint64_t>() > MAX)
            reject(field, "must be a whole number up to 10^15, not " + excerpt(value));
        return value.get<int64_t>();
    }
    int64_t natural(const std::string& field, int64_t otherwise) const {
        return has(field) ? natural(field) : otherwise;
    }
    float positive(const std::string& field, float otherwise) const {
        if (!has(field)) return otherwise;
        const float number = object[field].is_number() ? object[field].get<float>() : 0;
        if (!(number > 0 && std::isfinite(number)))
            reject(field, "must be a positive number, not " + excerpt(object[field]));
        return number;
    }
    float positive(const std::string& field) const { return at(field), positive(field, 0); }
    bool boolean(const std::string& field, bool otherwise) const {
        if (!has(field)) return otherwise;
        if (!object[field].is_boolean()) reject(field, "must be a boolean, not " + excerpt(object[field]));
        return object[field].get<bool>();
    }
    std::string text(const std::string& field) const {
        if (!at(field).is_string()) reject(field, "must be text, not " + excerpt(object[field]));
        return object[field].get<std::string>();
    }
    // The object in this field; one without fields if it is missing.
    Fields inner(const std::string& field) const {
        if (!has(field)) return {path, nlohmann::json::object()};
        if (!object[field].is_object()) reject(field, "must be an object, not " + excerpt(object[field]));
        return {path, object[field]};
    }
};

}  // namespace coat

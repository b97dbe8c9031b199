//! Reads the JSON text of objects: their fields, which ones are unknown, which one is wrong, and
//! durations. A section that is judged on its own stays text until then. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;

use diy_mesh_model::json::{path_at, reason};
use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer};
use serde_ignored::Path;
use serde_json::Value;
use serde_json::value::RawValue;

use super::Rejection;
use super::condition::UNSUPPORTED_VALUE;
use super::rejection::{not, shortened, unsupported};

/// The annotation in which `kubectl apply` keeps the object that it has sent.
pub const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// The text of a field that an object does not have.
pub(crate) const NULL: &str = "null";

/// The fields of a JSON object. Any other value has none.
pub(crate) fn fields(json: &str) -> BTreeMap<String, &RawValue> {
    serde_json::from_str(json).unwrap_or_default()
}

/// The text of a field of a JSON object.
pub(crate) fn field<'a>(json: &'a str, name: &str) -> &'a str {
    fields(json).get(name).map_or(NULL, |value| value.get())
}

/// The items of a JSON list. Any other value has none.
pub(crate) fn items(json: &str) -> Vec<&RawValue> {
    serde_json::from_str(json).unwrap_or_default()
}

/// The value of a JSON string.
pub(crate) fn string(json: &str) -> Option<String> {
    serde_json::from_str(json).ok()
}

/// The fields of a spec that `kubectl apply` has sent, by its annotation, and the API server has
/// not stored. It drops fields that a kind does not have, such as misspelt ones. The two specs are
/// compared as trees of values.
pub fn dropped(last_applied: &str, spec: &str) -> Vec<String> {
    let tree = |json| serde_json::from_str::<Value>(json).unwrap_or_default();
    let lost = lost(&tree(field(last_applied, "spec")), &tree(spec), any_item);
    let lost = lost.into_iter();
    lost.map(|path| format!("spec.{path}")).collect()
}

/// The paths of the fields that a value has, with `[]` for any item of a list.
pub fn paths(value: &Value) -> BTreeSet<String> {
    paths_with(value, any_item)
}

/// The paths of the fields of a value that a later form of the value does not have.
pub(crate) fn lost(before: &Value, after: &Value, item: Item) -> Vec<String> {
    let kept = paths_with(after, item);
    let mut lost = Vec::new();
    walk(before, "", item, &mut |path| {
        let is_kept = kept.contains(path);
        if !is_kept {
            lost.push(path.to_owned());
        }
        is_kept
    });
    lost
}

/// The text of the position of an item in a path.
pub(crate) type Item = fn(usize) -> String;

fn any_item(_: usize) -> String {
    "[]".to_owned()
}

/// The item at this position.
pub(crate) fn nth_item(position: usize) -> String {
    format!("[{position}]")
}

fn paths_with(value: &Value, item: Item) -> BTreeSet<String> {
    let mut paths = BTreeSet::new();
    walk(value, "", item, &mut |path| {
        paths.insert(path.to_owned());
        true
    });
    paths
}

/// Visits the path of each field and item, and what is inside where `visit` returns true. Null is no
/// value: the API server stores none.
fn walk(value: &Value, path: &str, item: Item, visit: &mut dyn FnMut(&str) -> bool) {
    if value.is_null() || !visit(path) {
        return;
    }
    for (name, value) in value.as_object().into_iter().flatten() {
        let dot = if path.is_empty() { "" } else { "." };
        walk(value, &format!("{path}{dot}{name}"), item, visit);
    }
    for (position, value) in value.as_array().into_iter().flatten().enumerate() {
        walk(value, &format!("{path}{}", item(position)), item, visit);
    }
}

/// The path of the first null in a JSON text.
pub(crate) fn null(json: &str) -> Option<String> {
    let (mut is_string, mut is_escaped) = (false, false);
    let before = json.bytes().position(|byte| {
        is_string ^= byte == b'"' && !is_escaped;
        is_escaped = is_string && byte == b'\\' && !is_escaped;
        byte == b'n' && !is_string
    });
    before.map(|length| path_at(json, length))
}

/// Reads the text of the field `at`. A field in it that its type does not have could change what it
/// means.
pub(crate) fn read_known<T: DeserializeOwned>(json: &str, at: &str) -> Result<T, Rejection> {
    let (read, unknown) = with_unknown_fields::<T>(json);
    match unknown.first() {
        Some(name) => Err(invalid(at, name, "unknown field")),
        None => read.map_err(|(path, error)| invalid(at, &path, error)),
    }
}

/// Reads the text of the field `at`, whatever other fields are in it.
pub(crate) fn read<'a, T: Deserialize<'a>>(json: &'a str, at: &str) -> Result<T, Rejection> {
    let (read, _) = with_unknown_fields(json);
    read.map_err(|(path, error)| invalid(at, &path, error))
}

fn invalid(at: &str, path: &str, error: impl Display) -> Rejection {
    let message = format!("{}: {error}", within(at, path));
    Rejection::new(UNSUPPORTED_VALUE, shortened(&message))
}

/// The path of a field within another.
pub(crate) fn within(at: &str, path: &str) -> String {
    let is_direct = path.is_empty() || path.starts_with('[');
    format!("{at}{}{path}", if is_direct { "" } else { "." })
}

/// A duration in milliseconds. Its text has the format of GEP-2257.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Milliseconds(pub u64);

impl<'de> Deserialize<'de> for Milliseconds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        milliseconds(&text).map(Self).ok_or_else(|| {
            let expected = "a duration, for example \"1m30s\" or \"500ms\"";
            D::Error::custom(not(&text, expected))
        })
    }
}

fn milliseconds(text: &str) -> Option<u64> {
    let (mut rest, mut total, mut components) = (text, 0, 0);
    while !rest.is_empty() || components == 0 {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = rest.split_at(digits);
        let units = [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000)];
        let (name, factor) = units.iter().find(|(name, _)| unit.starts_with(name))?;
        components += 1;
        if !(1..=5).contains(&digits) || components > 4 {
            return None;
        }
        total += number.parse::<u64>().ok()? * factor;
        rest = &rest[digits + name.len()..];
    }
    Some(total)
}

/// The values of an enumeration, with their texts.
pub(crate) trait Named: Copy + 'static {
    const NAMES: &'static [(&'static str, Self)];
}

/// A value of an enumeration.
#[derive(Clone, Copy, Debug)]
pub struct Name<T>(pub T);

impl<'de, T: Named> Deserialize<'de> for Name<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let value = named(&text, T::NAMES).map(Self);
        value.map_err(|expected| D::Error::custom(not(&text, &expected)))
    }
}

/// The value of a text of an enumeration. Without a text, the first one.
pub(crate) fn one_of<T: Copy>(
    field: &str,
    text: Option<&str>,
    values: &[(&str, T)],
) -> Result<T, Rejection> {
    let value = text.map_or(Ok(values[0].1), |text| named(text, values));
    value.map_err(|expected| unsupported(field, text.unwrap_or_default(), &expected))
}

/// The value of this name, or what is expected in its place.
fn named<T: Copy>(text: &str, values: &[(&str, T)]) -> Result<T, String> {
    let value = values.iter().find(|(name, _)| *name == text);
    value.map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<&str> = values.iter().map(|(name, _)| *name).collect();
        let (last, others) = names.split_last().expect("an enumeration has values");
        format!("{} or {last}", others.join(", "))
    })
}

/// Reads a JSON text, or tells the path of a field that cannot be read, with the reason; and the
/// paths of the fields that its type does not have. The callback has one type, so that each type of
/// a field is compiled once.
pub(crate) fn with_unknown_fields<'a, T: Deserialize<'a>>(
    json: &'a str,
) -> (Result<T, (String, String)>, Vec<String>) {
    let mut unknown = Vec::new();
    let mut note: &mut dyn FnMut(Path<'_>) = &mut |path| unknown.push(text(&path));
    let mut document = serde_json::Deserializer::from_str(json);
    let document = serde_ignored::Deserializer::new(&mut document, &mut note);
    let read = serde_path_to_error::deserialize(document).map_err(|error| {
        let path = error.path().to_string();
        let path = if path == "." { String::new() } else { path };
        (path, reason(error.inner()))
    });
    (read, unknown)
}

/// A path such as `spec.rules[0].name`.
fn text(path: &Path<'_>) -> String {
    match path {
        Path::Root => String::new(),
        Path::Seq { parent, index } => format!("{}[{index}]", text(parent)),
        Path::Map { parent, key } => match text(parent) {
            parent if parent.is_empty() => key.clone(),
            parent => format!("{parent}.{key}"),
        },
        Path::Some { parent }
        | Path::NewtypeStruct { parent }
        | Path::NewtypeVariant { parent } => text(parent),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn sections_stay_text_and_others_are_read_with_paths() {
        #[derive(Debug, Deserialize)]
        struct Spec {
            sections: Vec<Box<RawValue>>,
            #[allow(dead_code)]
            port: u16,
        }
        let text = r#"{"sections":[{"a": 1e2}, null, "x"],"prot":1,"port":80}"#;
        let (read, unknown) = with_unknown_fields::<Spec>(text);
        let sections = read.unwrap().sections;
        let sections: Vec<&str> = sections.iter().map(|one| one.get()).collect();
        assert_eq!(sections, [r#"{"a": 1e2}"#, "null", r#""x""#]);
        assert_eq!(unknown, ["prot"]);
        let (read, _) = with_unknown_fields::<Spec>(r#"{"sections":[],"port":"at line 1"}"#);
        let reason = "invalid type: string \"at line 1\", expected u16";
        assert_eq!(read.unwrap_err(), ("port".to_owned(), reason.to_owned()));
    }

    #[test]
    fn null_is_found_outside_of_texts() {
        let json = r#"{"null":["null","\\",{"a\"null":"\"n","b":[1,null]}],"c":null}"#;
        assert_eq!(null(json).as_deref(), Some("null[2].b[1]"));
        assert_eq!(null("null").as_deref(), Some(""));
        let without = json.replace(",null", "").replace(":null", ":true");
        assert_eq!(null(&without), None);
    }

    #[test]
    fn fields_in_a_lost_one_cost_nothing() {
        // An annotation has up to 256 KiB. The paths of these fields would have 4 GB.
        let inner: serde_json::Map<_, _> =
            (0..30_000).map(|at| (at.to_string(), 1.into())).collect();
        let applied = json!({"spec": {"x".repeat(128 * 1024): inner}}).to_string();
        let lost = dropped(&applied, "{}");
        assert_eq!(lost, [format!("spec.{}", "x".repeat(128 * 1024))]);
    }

    #[test]
    fn lost_fields_are_named_without_what_is_in_them() {
        let before = json!({"a": {"b": {"c": 1}}, "d": [{"e": 1}, {"f": {"g": 1}}], "h": null});
        let after = json!({"a": {}, "d": [{"e": 2}, {}], "i": 1});
        assert_eq!(lost(&before, &after, nth_item), ["a.b", "d[1].f"]);
        assert_eq!(lost(&before, &after, any_item), ["a.b", "d[].f"]);
        let reordered = json!({"a": {"b": {"c": 1}}, "d": [{"f": {"g": 1}}, {"e": 1}]});
        assert_eq!(lost(&before, &reordered, any_item), [""; 0]);
    }
}

//! Fields of objects that their types do not have. Pure.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_ignored::Path;
use serde_json::Value;

use crate::routes::UNSUPPORTED_VALUE;
use crate::routes::model::Rejection;
use crate::routes::parse::{shortened, unsupported};

/// Reads the field `at`. A field in it that its type does not have could change what it means.
pub(crate) fn read_known<T: DeserializeOwned>(value: &Value, at: &str) -> Result<T, Rejection> {
    let (read, unknown) = with_unknown_fields(value);
    let read = match unknown.first() {
        Some(name) if name.starts_with('[') => Err(format!("{at}{name}: unknown field")),
        Some(name) => Err(format!("{at}.{name}: unknown field")),
        None => read.map_err(|error| format!("{at}: {error}")),
    };
    read.map_err(|message| Rejection::new(UNSUPPORTED_VALUE, shortened(&message)))
}

/// The value of a text of an enumeration. Without a text, the first one.
pub(crate) fn one_of<T: Copy>(
    field: &str,
    text: Option<&str>,
    values: &[(&str, T)],
) -> Result<T, Rejection> {
    let is_named = |(name, _): &&(&str, T)| text.is_none_or(|text| text == *name);
    let value = values.iter().find(is_named);
    value.map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<&str> = values.iter().map(|(name, _)| *name).collect();
        let (last, others) = names.split_last().expect("an enumeration has values");
        let expected = format!("{} or {last}", others.join(", "));
        unsupported(field, text.unwrap_or_default(), &expected)
    })
}

/// Reads a value, and the paths of the fields that its type does not have.
pub(crate) fn with_unknown_fields<'a, T, D>(document: D) -> (Result<T, D::Error>, Vec<String>)
where
    T: Deserialize<'a>,
    D: Deserializer<'a>,
{
    let mut unknown = Vec::new();
    let value = serde_ignored::deserialize(document, |path| unknown.push(text(&path)));
    (value, unknown)
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

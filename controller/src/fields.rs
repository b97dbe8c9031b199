//! Reads fields of objects: which ones are unknown, which one is wrong, and durations. Pure.

use std::collections::BTreeSet;
use std::fmt::Display;

use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer};
use serde_ignored::Path;
use serde_json::Value;

use crate::routes::UNSUPPORTED_VALUE;
use crate::routes::model::Rejection;
use crate::routes::parse::{not, shortened, unsupported};

/// The annotation in which `kubectl apply` keeps the object that it has sent.
pub const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// The fields of a spec that `kubectl apply` has sent, by its annotation, and that the API server has
/// not stored: it drops fields that a kind does not have, such as misspelt ones.
pub fn dropped(last_applied: &str, spec: &Value) -> Vec<String> {
    let applied: Value = serde_json::from_str(last_applied).unwrap_or_default();
    let stored = paths(spec);
    let lost = paths(&applied["spec"]).into_iter();
    let lost = lost.filter(|path| !stored.contains(path));
    lost.map(|path| format!("spec.{path}")).collect()
}

/// The paths of the fields that a value has, with `[]` for any item of a list.
pub fn paths(value: &Value) -> BTreeSet<String> {
    fn collect(value: &Value, path: &str, paths: &mut BTreeSet<String>) {
        for (name, value) in value.as_object().into_iter().flatten() {
            let dot = if path.is_empty() { "" } else { "." };
            // The API server stores no null.
            if !value.is_null() {
                collect(value, &format!("{path}{dot}{name}"), paths);
            }
        }
        for item in value.as_array().into_iter().flatten() {
            collect(item, &format!("{path}[]"), paths);
        }
        paths.insert(path.to_owned());
    }
    let mut paths = BTreeSet::new();
    collect(value, "", &mut paths);
    paths
}

/// Reads the field `at`. A field in it that its type does not have could change what it means.
pub(crate) fn read_known<T: DeserializeOwned>(value: &Value, at: &str) -> Result<T, Rejection> {
    let (read, unknown) = with_unknown_fields(value);
    match unknown.first() {
        Some(name) => Err(invalid(at, name, "unknown field")),
        None => read.map_err(|(path, error)| invalid(at, &path, error)),
    }
}

/// Reads the field `at`, whatever other fields are in it.
pub(crate) fn read<'a, T: Deserialize<'a>>(value: &'a Value, at: &str) -> Result<T, Rejection> {
    let read = serde_path_to_error::deserialize(value).map_err(located);
    read.map_err(|(path, error)| invalid(at, &path, error))
}

fn invalid(at: &str, path: &str, error: impl Display) -> Rejection {
    let dot = if path.is_empty() || path.starts_with('[') {
        ""
    } else {
        "."
    };
    let message = format!("{at}{dot}{path}: {error}");
    Rejection::new(UNSUPPORTED_VALUE, shortened(&message))
}

/// The path of a field, and its error.
pub(crate) type Located<E> = (String, E);

fn located<E>(error: serde_path_to_error::Error<E>) -> Located<E> {
    let path = error.path().to_string();
    let path = if path == "." { String::new() } else { path };
    (path, error.into_inner())
}

/// A duration in milliseconds, whose text is that of GEP-2257.
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

/// Reads a value, or tells the path of a field that cannot be read; and the paths of the fields that
/// its type does not have.
pub(crate) fn with_unknown_fields<'a, T, D>(
    document: D,
) -> (Result<T, Located<D::Error>>, Vec<String>)
where
    T: Deserialize<'a>,
    D: Deserializer<'a>,
{
    let mut unknown = Vec::new();
    let mut note = |path: Path<'_>| unknown.push(text(&path));
    let document = serde_ignored::Deserializer::new(document, &mut note);
    let value = serde_path_to_error::deserialize(document).map_err(located);
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

//! Suggestions for misspelled flags that clap does not find: it finds no exchanged letters in names
//! of three letters, such as `--fro`. Pure.

use std::ffi::OsString;

use clap::Command;
use clap::error::{ContextKind, ContextValue, Error, ErrorKind};

/// Adds the flag with two exchanged letters to the error of an unknown one, if it has no suggestion.
pub(super) fn add(mut error: Error, program: Command, arguments: &[OsString]) -> Error {
    let is_complete = error.get(ContextKind::SuggestedArg).is_some();
    if error.kind() != ErrorKind::UnknownArgument || is_complete {
        return error;
    }
    let Some(ContextValue::String(unknown)) = error.get(ContextKind::InvalidArg) else {
        return error;
    };
    let command = selected(&program, arguments);
    let shown = command.get_arguments().filter(|flag| !flag.is_hide_set());
    let mut flags = shown.filter_map(|flag| Some(format!("--{}", flag.get_long()?)));
    if let Some(similar) = flags.find(|flag| is_exchanged(unknown, flag)) {
        error.insert(ContextKind::SuggestedArg, ContextValue::String(similar));
    }
    error
}

/// The command that the arguments name.
fn selected<'a>(program: &'a Command, arguments: &[OsString]) -> &'a Command {
    let mut named = arguments.iter();
    let command = named.find_map(|name| program.find_subcommand(name));
    command.unwrap_or(program)
}

/// Whether the names differ by the order of two neighboring letters.
fn is_exchanged(one: &str, other: &str) -> bool {
    let mut bytes = one.as_bytes().to_vec();
    let first = one.bytes().zip(other.bytes()).position(|(a, b)| a != b);
    let Some(first) = first.filter(|first| first + 1 < bytes.len()) else {
        return false;
    };
    bytes.swap(first, first + 1);
    bytes == other.as_bytes()
}

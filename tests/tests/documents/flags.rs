//! The tables of flags in docs/reference are generated from the definitions of the flags.

use std::collections::BTreeMap;

use clap::{Arg, Command, CommandFactory};

use super::generated::assert_generated;

/// The row of a flag or an argument.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Row {
    /// The name of the flag. `None`: it is an argument.
    flag: Option<String>,
    /// With its value.
    name: String,
    environment: String,
    default: String,
    description: String,
}

#[test]
fn reference_has_the_flags_of_each_program() {
    let programs = programs();
    let texts = programs.iter().map(|(name, command)| {
        let text = program(&rows(command));
        ((*name).to_owned(), text)
    });
    assert_generated("docs/reference/programs.md", "flags", &texts.collect());
}

#[test]
fn reference_has_the_flags_of_each_command() {
    let mut commands = BTreeMap::new();
    let command = diy_mesh::commands::command();
    for below in command.get_subcommands() {
        add(below.get_name().to_owned(), below, &mut commands);
    }
    let texts = BTreeMap::from([("mesh".to_owned(), command_line(&commands))]);
    assert_generated("docs/reference/mesh.md", "flags", &texts);
}

fn programs() -> BTreeMap<&'static str, Command> {
    BTreeMap::from([
        ("proxy", diy_mesh_proxy::config::Config::command()),
        ("proxy-init", diy_mesh_proxy_init::config::Config::command()),
        ("controller", diy_mesh_controller::Config::command()),
        ("injector", diy_mesh_injector::Flags::command()),
        (
            "http-server",
            diy_mesh_sample_apps::config::ServerConfig::command(),
        ),
        (
            "http-client",
            diy_mesh_sample_apps::config::ClientConfig::command(),
        ),
    ])
}

/// Adds a command and those below it.
fn add<'a>(name: String, command: &'a Command, to: &mut BTreeMap<String, &'a Command>) {
    for below in command.get_subcommands() {
        add(format!("{name} {}", below.get_name()), below, to);
    }
    to.insert(name, command);
}

/// The table of a program's flags.
fn program(rows: &[Row]) -> String {
    let has_environment = rows.iter().any(|row| !row.environment.is_empty());
    let line = |name: &str, environment: &str, default: &str, description: &str| {
        if has_environment {
            table_row(&[name, environment, default, description])
        } else {
            table_row(&[name, default, description])
        }
    };
    let mut text = line("flag", "environment", "default", "description");
    text += &line("---", "---", "---", "---").replace(' ', "");
    for row in rows {
        text += &line(&row.name, &row.environment, &row.default, &row.description);
    }
    text
}

/// The commands with their exit codes, and each flag with the commands that have it.
fn command_line(commands: &BTreeMap<String, &Command>) -> String {
    let mut text = "| command | description | exit codes |\n|---|---|---|\n".to_owned();
    let mut flags: BTreeMap<Row, Vec<&str>> = BTreeMap::new();
    for (name, command) in commands {
        let about = command.get_about().map(ToString::to_string);
        let about = cell(&about.unwrap_or_default());
        text += &table_row(&[&format!("`{name}`"), &about, &exit_codes(command)]);
        for row in rows(command) {
            flags.entry(row).or_default().push(name);
        }
    }
    text += "\n| flag | commands | default | description |\n|---|---|---|---|\n";
    for (row, commands) in flags {
        let names = format!("`{}`", commands.join("`, `"));
        text += &table_row(&[&row.name, &names, &row.default, &row.description]);
    }
    text
}

/// The exit codes in the help of a command.
fn exit_codes(command: &Command) -> String {
    let help = command.get_after_help().map(ToString::to_string);
    let help = help.unwrap_or_default();
    let codes = help
        .split("\n\n")
        .find_map(|part| part.strip_prefix("Exit codes:"));
    cell(codes.unwrap_or_default().trim().trim_end_matches('.'))
}

fn table_row(cells: &[&str]) -> String {
    format!("| {} |\n", cells.join(" | ")).replace("|  |", "| |")
}

fn rows(command: &Command) -> Vec<Row> {
    let arguments = command.get_arguments().filter(|one| !one.is_hide_set());
    arguments.map(row).collect()
}

fn row(argument: &Arg) -> Row {
    let takes_value = argument.get_action().takes_values();
    let value = argument.get_value_names().map(|names| names.join(" "));
    let value = value.filter(|_| takes_value);
    let short = argument.get_short().map(|short| format!("`-{short}`, "));
    let flag = argument.get_long().map(|long| format!("--{long}"));
    let words = [flag.clone(), value];
    let words: Vec<String> = words.into_iter().flatten().collect();
    let name = format!("{}`{}`", short.unwrap_or_default(), words.join(" "));
    let help = argument.get_long_help().or(argument.get_help());
    let help = help.map(ToString::to_string).unwrap_or_default();
    // A text may end with "[default: TEXT]", where clap knows no value, or with "[required TEXT]".
    let note = help.rsplit_once(" [").filter(|(_, note)| {
        note.ends_with(']')
            && ["default: ", "required"]
                .iter()
                .any(|one| note.starts_with(one))
    });
    let (help, note) = note.unwrap_or((&help, ""));
    let note = note.trim_start_matches("default: ").trim_end_matches(']');
    let values = argument.get_default_values().iter();
    let values: Vec<_> = values.map(|value| value.to_string_lossy()).collect();
    let is_hidden = argument.is_hide_default_value_set() || values.concat().is_empty();
    let default = match takes_value && !is_hidden {
        _ if argument.is_required_set() => "required".to_owned(),
        true => format!("`{}`", values.join(",")),
        false => note.to_owned(),
    };
    let values = argument.get_possible_values();
    let values = values
        .iter()
        .filter(|value| takes_value && !value.is_hide_set());
    let values: Vec<_> = values
        .map(|value| match (value.get_name(), value.get_help()) {
            (name, Some(help)) if help.to_string().to_lowercase() != name => {
                format!("`{name}` ({help})")
            }
            (name, _) => format!("`{name}`"),
        })
        .collect();
    let help = if values.is_empty() {
        help.to_owned()
    } else {
        format!("{help}: {}", values.join(", "))
    };
    let environment = argument
        .get_env()
        .map(|name| format!("`{}`", name.to_string_lossy()));
    Row {
        flag,
        name: cell(&name),
        environment: environment.unwrap_or_default(),
        default: cell(&default),
        description: cell(&help),
    }
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

//! The tables of flags in docs/reference.md are generated from the definitions of the flags.

use std::collections::{BTreeMap, BTreeSet};

use clap::{Arg, Command, CommandFactory};

use super::generated::assert_generated;

/// The command with the flags that most commands have. Their tables refer to it.
const COMMON: &str = "mesh identity";
const COLUMNS: usize = 100;

/// The row of a flag or an argument.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Row {
    /// With its value.
    name: String,
    /// None: an argument.
    flag: Option<String>,
    environment: String,
    default: String,
    description: String,
}

#[test]
fn reference_has_the_flags_of_each_command() {
    let commands = commands();
    let common = rows(&commands[COMMON]).into_iter().collect();
    let texts = commands.iter().map(|(name, command)| {
        let text = match name.as_str() {
            COMMON => text(command, &BTreeSet::new()),
            _ => text(command, &common),
        };
        (name.clone(), text)
    });
    assert_generated("docs/reference.md", "flags", &texts.collect());
}

/// The programs and commands with flags.
fn commands() -> BTreeMap<String, Command> {
    let mut commands = BTreeMap::from([
        (
            "proxy".to_owned(),
            diy_mesh_proxy::config::Config::command(),
        ),
        (
            "proxy-init".to_owned(),
            diy_mesh_proxy_init::config::Config::command(),
        ),
        (
            "controller".to_owned(),
            diy_mesh_controller::Config::command(),
        ),
        ("injector".to_owned(), diy_mesh_injector::Flags::command()),
        (
            "http-server".to_owned(),
            diy_mesh_sample_apps::config::ServerConfig::command(),
        ),
        (
            "http-client".to_owned(),
            diy_mesh_sample_apps::config::ClientConfig::command(),
        ),
    ]);
    add(
        "mesh".to_owned(),
        diy_mesh::commands::command(),
        &mut commands,
    );
    commands
}

/// Adds a command and those below it.
fn add(name: String, command: Command, to: &mut BTreeMap<String, Command>) {
    for below in command.get_subcommands() {
        add(format!("{name} {}", below.get_name()), below.clone(), to);
    }
    if !rows(&command).is_empty() || command.has_subcommands() {
        to.insert(name, command);
    }
}

/// The commands below a command, the table of its flags, and its exit codes.
fn text(command: &Command, common: &BTreeSet<Row>) -> String {
    let mut text = String::new();
    let below: Vec<_> = command.get_subcommands().collect();
    if !below.is_empty() {
        text += "\n| command | description |\n|---|---|\n";
    }
    for one in below {
        let about = one.get_about().map(ToString::to_string).unwrap_or_default();
        text += &format!("| `{}` | {} |\n", one.get_name(), cell(&about));
    }
    let (same, own): (Vec<_>, Vec<_>) = rows(command)
        .into_iter()
        .partition(|row| common.contains(row));
    let has_environment = own.iter().any(|row| !row.environment.is_empty());
    let line = |name: &str, environment: &str, default: &str, description: &str| {
        let mut cells = vec![name, environment, default, description];
        if !has_environment {
            cells.remove(1);
        }
        format!("| {} |\n", cells.join(" | ")).replace("|  |", "| |")
    };
    if !own.is_empty() || !same.is_empty() {
        text += "\n";
        text += &line("flag", "environment", "default", "description");
        text += &line("---", "---", "---", "---").replace(' ', "");
    }
    for row in own {
        let environment = &row.environment;
        text += &line(&row.name, environment, &row.default, &row.description);
    }
    if !same.is_empty() {
        let names: Vec<_> = same
            .iter()
            .filter_map(|row| Some(format!("`{}`", row.flag.as_ref()?)))
            .collect();
        let anchor = COMMON.replace(' ', "-");
        let description = format!("as for [`{COMMON}`](#{anchor})");
        text += &line(&names.join(", "), "", "", &description);
    }
    let help = command
        .get_after_help()
        .map(ToString::to_string)
        .unwrap_or_default();
    if let Some(codes) = help
        .split("\n\n")
        .find(|one| one.starts_with("Exit codes:"))
    {
        text += &format!("\n{}", filled(codes));
    }
    text + "\n"
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
        name,
        flag,
        environment: environment.unwrap_or_default(),
        default: cell(&default),
        description: cell(&help),
    }
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

/// A paragraph in lines.
fn filled(text: &str) -> String {
    let mut filled = String::new();
    let mut width = 0;
    for word in text.split_whitespace() {
        width += 1 + word.len();
        if width > COLUMNS {
            filled += "\n";
            width = word.len();
        } else if !filled.is_empty() {
            filled += " ";
        }
        filled += word;
    }
    filled + "\n"
}

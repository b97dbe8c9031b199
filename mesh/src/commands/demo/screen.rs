//! Standard output of `mesh demo`: status lines, one line per exchange, and blocks with all that the
//! containers of an exchange print.

use std::{collections::BTreeSet, io};

use anyhow::Result;

use super::{
    names::{Names, Party},
    story::{Exchange, Item, Output, PROXY_CONTAINERS, ProxyDump, Story},
};
use crate::commands::why;
use crate::terminal::{self, Colors, TextStyle};
use diy_mesh_sandbox::protocol::{PodView, Source};

/// The amount of output of the demo.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// The summary.
    Summary,
    /// The first exchange of each pair of workloads as a block, then one line per exchange.
    Story,
    /// All exchanges as blocks, and all other output.
    Everything,
}

/// Standard output.
pub struct Screen {
    detail: Detail,
    /// The workloads, pods, containers and namespaces to show. Empty: all.
    only: Vec<String>,
    /// The pods of these workloads print JSON, as their manifests request.
    json: BTreeSet<(String, String)>,
    colors: Colors,
    /// The pairs of workloads with a printed block.
    introduced: BTreeSet<[String; 2]>,
    /// Warnings are printed after the start.
    is_ready: bool,
    printed: BTreeSet<String>,
    /// The widths of the names, of the requests and of the statuses in lines of exchanges.
    widths: [usize; 3],
    /// The width of the prefixes of output without an exchange.
    prefix_width: usize,
    /// Failures name the command that explains them.
    names_why: bool,
    /// The last output is a block of several lines, and ends with an empty line.
    after_block: bool,
}

impl Screen {
    /// Creates a screen. `json` contains namespaces and names of workloads.
    pub fn new(detail: Detail, only: Vec<String>, json: BTreeSet<(String, String)>) -> Self {
        Self {
            detail,
            only,
            json,
            colors: Colors::of(&io::stdout()),
            introduced: BTreeSet::new(),
            is_ready: false,
            printed: BTreeSet::new(),
            widths: [0; 3],
            prefix_width: 0,
            names_why: false,
            after_block: true,
        }
    }

    /// The amount of output of the demo.
    pub fn detail(&self) -> Detail {
        self.detail
    }

    /// From now on, failures name the command that explains them.
    pub fn name_why(&mut self) {
        self.names_why = true;
    }

    /// Prints a status line of the demo.
    pub fn print_status(&mut self, text: &str) -> Result<()> {
        if self.detail == Detail::Summary {
            return Ok(());
        }
        let line = format!("mesh demo: {text}");
        let line = self.colors.paint(TextStyle::Bold, &line);
        terminal::write(&format!("{line}\n"))
    }

    /// Prints that everything is ready.
    pub fn print_ready(&mut self, text: &str) -> Result<()> {
        self.is_ready = true;
        self.print_status(text)?;
        if self.detail == Detail::Story {
            self.print_status(
                "first exchange of each pair of workloads in full, then one line each",
            )?;
            self.print_status("for all exchanges in full: --full, or --only NAME")?;
            self.after_block = false;
        }
        Ok(())
    }

    /// Records a pod, and prints that it has become ready.
    pub fn pod(&mut self, pod: &PodView) -> Result<()> {
        let state = match () {
            () if pod.terminating => return Ok(()),
            () if pod.ready && pod.injected => "is ready, with its proxy",
            () if pod.ready => "is ready",
            () => return Ok(()),
        };
        let mut containers = pod.containers.iter();
        let is_shown = containers.any(|container| self.shows(&pod.source(container)));
        let text = format!("{} {state}", pod.full_name());
        if self.detail == Detail::Everything && is_shown && self.printed.insert(text.clone()) {
            self.print_status(&text)?;
        }
        Ok(())
    }

    /// Prints an exchange or the output of a container.
    pub fn print(&mut self, item: &Item, story: &Story) -> Result<()> {
        terminal::write(&self.format(item, story))
    }

    /// Formats an exchange or the output of a container.
    pub fn format(&mut self, item: &Item, story: &Story) -> String {
        match (self.detail, item) {
            (Detail::Summary, _) => String::new(),
            (_, Item::Exchange(exchange)) => self.exchange(exchange, story),
            (Detail::Story, Item::Output(output)) => self.warnings(output, &story.names),
            (Detail::Everything, Item::Output(output)) => self.output(output, &story.names),
        }
    }

    fn exchange(&mut self, exchange: &Exchange, story: &Story) -> String {
        let Some([caller, callee]) = story.parties(exchange) else {
            return String::new();
        };
        let pair = [caller.workload.clone(), callee.workload.clone()];
        let is_complete = exchange
            .dump()
            .is_some_and(|dump| dump.incomplete.is_none());
        let parts = match self.detail {
            // The client is outside the pods, such as on the node.
            Detail::Story if caller.color_code.is_none() => return String::new(),
            Detail::Story if is_complete && self.introduced.insert(pair) => {
                self.parts(exchange, &story.names)
            }
            Detail::Story | Detail::Summary => String::new(),
            Detail::Everything => match self.parts(exchange, &story.names) {
                parts if parts.is_empty() => return parts,
                parts => parts,
            },
        };
        let line = self.headline(exchange, &caller, &callee);
        let is_block = !parts.is_empty();
        let before = if is_block && !self.after_block {
            "\n"
        } else {
            ""
        };
        self.after_block = is_block;
        format!("{before}{line}{parts}{}", if is_block { "\n" } else { "" })
    }

    /// The output of each container about an exchange, from the caller to the callee.
    fn parts(&self, exchange: &Exchange, names: &Names) -> String {
        let outputs = [
            exchange.caller_output.clone(),
            exchange.outbound.as_ref().map(|proxy| self.dump(proxy)),
            exchange.inbound.as_ref().map(|proxy| self.dump(proxy)),
            exchange.callee_output.clone(),
        ];
        let shown = outputs.iter().flatten();
        let shown: Vec<&Output> = shown.filter(|output| self.shows(&output.source)).collect();
        let prefixes = shown.iter().map(|output| prefix(output, names).len());
        let width = prefixes.max().unwrap_or(0);
        shown
            .iter()
            .map(|output| self.lines(output, names, width))
            .collect()
    }

    fn dump(&self, ProxyDump { source, dump, line }: &ProxyDump) -> Output {
        let workload = (source.namespace.clone(), source.workload.clone());
        let lines = if self.json.contains(&workload) {
            vec![line.clone()]
        } else {
            dump.text().trim_end().lines().map(str::to_owned).collect()
        };
        let source = source.clone();
        Output { source, lines }
    }

    /// `http-client -> http-server-v2  GET /hello  200  1.2 ms  mTLS`.
    fn headline(&mut self, exchange: &Exchange, caller: &Party, callee: &Party) -> String {
        let Some(dump) = exchange.dump() else {
            return String::new();
        };
        let (subject, status) = (dump.subject(), dump.status().unwrap_or_else(|| "-".into()));
        let lengths = [
            caller.name.len() + callee.name.len(),
            subject.chars().count().min(MAX_SUBJECT_WIDTH),
            status.len(),
        ];
        for (width, length) in self.widths.iter_mut().zip(lengths) {
            *width = length.max(*width);
        }
        let [names, subjects, statuses] = self.widths;
        let padding = names - lengths[0];
        let style = if exchange.is_failure() {
            TextStyle::Error
        } else {
            TextStyle::Ok
        };
        let status = self.colors.paint(style, &format!("{status:statuses$}"));
        let security = if exchange.is_mutual_tls() {
            "mTLS"
        } else {
            "plaintext"
        };
        let mut line = format!(
            "{} -> {}{:padding$}  {subject:subjects$}  {status}  {:6.1} ms  {security}",
            self.paint(caller),
            self.paint(callee),
            "",
            dump.duration_ms,
        );
        if let Some(failure) = &dump.failure {
            line += &format!("  {}: {}", failure.code, failure.message);
        }
        if let Some(reason) = &dump.incomplete {
            line += &format!("  {reason}");
        }
        let is_explained = self.names_why && exchange.is_failure();
        if let Some(id) = dump.id.filter(|_| is_explained) {
            line += &format!("  {}", why::command(id, true));
        }
        line + "\n"
    }

    fn paint(&self, party: &Party) -> String {
        match party.color_code {
            Some(code) => self.colors.paint_code(code, &party.name),
            None => party.name.clone(),
        }
    }

    /// Formats output without an exchange.
    fn output(&mut self, output: &Output, names: &Names) -> String {
        if !self.shows(&output.source) {
            return String::new();
        }
        self.prefix_width = self.prefix_width.max(prefix(output, names).len());
        self.after_block = false;
        self.lines(output, names, self.prefix_width)
    }

    /// The lines of a container, each with the short name of its pod.
    fn lines(&self, output: &Output, names: &Names, width: usize) -> String {
        let Source { namespace, pod, .. } = &output.source;
        let prefix = format!("{:width$}", prefix(output, names));
        let code = names.color_code(namespace, pod);
        let prefix = self.colors.paint_code(code, &prefix);
        let lines = output.lines.iter();
        lines.map(|line| format!("  {prefix} {line}\n")).collect()
    }

    /// The warnings and errors of the mesh, except the ones of the start.
    fn warnings(&mut self, output: &Output, names: &Names) -> String {
        let is_warning = |line: &&String| line.contains(" WARN ") || line.contains(" ERROR ");
        let lines: Vec<String> = output.lines.iter().filter(is_warning).cloned().collect();
        let container = output.source.container.as_str();
        let is_mesh = PROXY_CONTAINERS.contains(&container)
            || ["controller", "injector"].contains(&container);
        if lines.is_empty() || !is_mesh || !self.is_ready {
            return String::new();
        }
        let source = output.source.clone();
        self.output(&Output { source, lines }, names)
    }

    fn shows(&self, source: &Source) -> bool {
        let Source {
            namespace,
            pod,
            workload,
            container,
        } = source;
        let names = [workload, pod, container, namespace];
        self.only.is_empty() || self.only.iter().any(|only| names.contains(&only))
    }
}

/// As in `kubectl logs --prefix`, with the short name of the pod.
fn prefix(output: &Output, names: &Names) -> String {
    let Source {
        namespace,
        pod,
        container,
        ..
    } = &output.source;
    format!("{}[{container}]", names.short(namespace, pod))
}

/// Longer requests are not aligned.
const MAX_SUBJECT_WIDTH: usize = 48;

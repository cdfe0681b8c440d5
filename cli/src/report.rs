//! Prints the findings: for people, for programs, and as annotations of a pull request.

use std::io::{self, Write};

use crate::args::Output;
use crate::validate::{Checked, Finding, Severity};

pub(crate) fn write(checked: &Checked, output: Output, out: &mut impl Write) -> io::Result<()> {
    match output {
        Output::Text => text(checked, out),
        Output::Json => writeln!(out, "{}", serde_json::to_string_pretty(checked).map_err(io::Error::other)?),
        Output::Github => checked.findings.iter().try_for_each(|finding| github(finding, out)),
    }
}

fn text(checked: &Checked, out: &mut impl Write) -> io::Result<()> {
    for Finding { severity, file, line, object, rule, message } in &checked.findings {
        let mark = match severity {
            Severity::Error => "",
            Severity::Warning => "warning: ",
        };
        writeln!(out, "{file}:{line}: {mark}{object}: {message} [{rule}]")?;
    }
    let errors = checked.findings.iter().filter(|finding| finding.severity == Severity::Error).count();
    match (checked.objects, errors) {
        (0, 0) => writeln!(out, "no objects of filter.plainsight.ai were found"),
        (objects, 0) => writeln!(out, "{objects} checked, nothing is wrong"),
        (objects, errors) => writeln!(out, "{objects} checked, {errors} mistakes"),
    }
}

fn github(finding: &Finding, out: &mut impl Write) -> io::Result<()> {
    let Finding { severity, file, line, object, rule, message } = finding;
    let command = match severity {
        Severity::Error => "error",
        Severity::Warning => "warning",
    };
    let (file, title) = (property(file), property(&format!("{object} [{rule}]")));
    writeln!(out, "::{command} file={file},line={line},title={title}::{}", data(message))
}

/// Escapes a value for workflow commands; otherwise it could end the command and begin another.
fn data(text: &str) -> String {
    text.replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A")
}

fn property(text: &str) -> String {
    data(text).replace(':', "%3A").replace(',', "%2C")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_annotation_cannot_be_ended_by_what_it_says() {
        let finding = Finding {
            severity: Severity::Warning,
            file: "a,b.yaml".into(),
            line: 3,
            object: "Pipeline x".into(),
            rule: "policy a/b".into(),
            message: "50% of\n::error::this".into(),
        };
        let mut out = Vec::new();
        github(&finding, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(
            text,
            "::warning file=a%2Cb.yaml,line=3,title=Pipeline x [policy a/b]::50%25 of%0A::error::this\n"
        );
    }
}

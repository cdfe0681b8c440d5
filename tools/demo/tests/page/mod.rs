//! The fenced blocks of a page, as its reader uses them.
#![allow(dead_code, reason = "each suite uses its own part")]

/// A fenced block.
pub struct Block {
    /// The word after the fence.
    pub language: String,
    /// The prose between the block before and this one.
    pub before: String,
    /// All its lines.
    pub text: String,
    /// The commands that the reader types.
    pub commands: Vec<Command>,
}

/// A command, and what the page shows below it.
pub struct Command {
    pub line: String,
    pub shown: Vec<String>,
}

/// Every block of a page. Blocks without a language contain commands only, `console` blocks also show what
/// the commands print, and blocks of other languages have no commands.
pub fn blocks(page: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut parts = page.split("```");
    while let (Some(before), Some(block)) = (parts.next(), parts.next()) {
        let Some((language, text)) = block.split_once('\n') else { continue };
        let commands = match language {
            "" => typed(text, ""),
            "console" => typed(text, "$ "),
            _ => Vec::new(),
        };
        blocks.push(Block {
            language: language.to_owned(),
            before: before.to_owned(),
            text: text.to_owned(),
            commands,
        });
    }
    blocks
}

/// The commands of a block, each of which begins with the prompt. A command goes on in the next line after a
/// backslash, and until the brace of a function is closed.
fn typed(text: &str, prompt: &str) -> Vec<Command> {
    let mut commands: Vec<Command> = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let Some(begin) = line.strip_prefix(prompt) else {
            if let Some(command) = commands.last_mut() {
                command.shown.push(line.to_owned());
            }
            continue;
        };
        let mut whole = begin.split("  #").next().unwrap_or_default().trim_end().to_owned();
        let is_function = whole.ends_with('{');
        while whole.ends_with('\\') || is_function && !whole.ends_with("\n}") {
            let Some(next) = lines.next() else { break };
            whole.push('\n');
            whole.push_str(next);
        }
        if !whole.is_empty() && !whole.starts_with('#') {
            commands.push(Command { line: whole, shown: Vec::new() });
        }
    }
    commands
}

//! The answer of a `Lines` filter: `{"ok":true}` or `{"ok":false,"reason":"…","retry":false}`.
//!
//! It accepts exactly this flat object: anything else is no answer, so that a typo never counts as success.

/// What a filter says about one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Accepted,
    Refused { reason: String, retry: bool },
}

/// Parses the text after the marker; `None` if it is no answer.
pub(crate) fn parse(text: &str) -> Option<Answer> {
    let mut rest = Rest { text: text.trim_matches(JSON_WHITESPACE) };
    let (mut ok, mut reason, mut retry) = (None, None, None);
    rest.take("{")?;
    loop {
        let name = rest.string()?;
        rest.take(":")?;
        match name.as_str() {
            "ok" if ok.is_none() => ok = Some(rest.boolean()?),
            "reason" if reason.is_none() => reason = Some(rest.string()?),
            "retry" if retry.is_none() => retry = Some(rest.boolean()?),
            _ => return None,
        }
        if rest.take(",").is_none() {
            break;
        }
    }
    rest.take("}")?;
    if !rest.text.is_empty() {
        return None;
    }
    Some(match ok? {
        true => Answer::Accepted,
        false => Answer::Refused { reason: reason.unwrap_or_default(), retry: retry.unwrap_or(true) },
    })
}

const JSON_WHITESPACE: [char; 4] = [' ', '\t', '\r', '\n'];

struct Rest<'a> {
    text: &'a str,
}

impl Rest<'_> {
    /// Takes a token and the whitespace around it.
    fn take(&mut self, token: &str) -> Option<()> {
        let rest = self.text.trim_start_matches(JSON_WHITESPACE).strip_prefix(token)?;
        self.text = rest.trim_start_matches(JSON_WHITESPACE);
        Some(())
    }

    fn boolean(&mut self) -> Option<bool> {
        match self.take("true") {
            Some(()) => Some(true),
            None => self.take("false").map(|()| false),
        }
    }

    fn string(&mut self) -> Option<String> {
        let mut value = String::new();
        let mut characters = self.text.strip_prefix('"')?.chars();
        loop {
            match characters.next()? {
                '"' => break,
                '\\' => value.push(escape(&mut characters)?),
                character if character < ' ' => return None,
                character => value.push(character),
            }
        }
        self.text = characters.as_str().trim_start_matches(JSON_WHITESPACE);
        Some(value)
    }
}

/// Parses the character after a backslash.
fn escape(characters: &mut std::str::Chars<'_>) -> Option<char> {
    Some(match characters.next()? {
        character @ ('"' | '\\' | '/') => character,
        'b' => '\u{8}',
        'f' => '\u{c}',
        'n' => '\n',
        'r' => '\r',
        't' => '\t',
        'u' => {
            let first = code_unit(characters)?;
            let mut units = vec![first];
            // A character beyond the first plane is written as two units.
            if (0xd800..0xdc00).contains(&first) {
                characters.next().filter(|next| *next == '\\')?;
                characters.next().filter(|next| *next == 'u')?;
                units.push(code_unit(characters)?);
            }
            char::decode_utf16(units).next()?.ok()?
        }
        _ => return None,
    })
}

fn code_unit(characters: &mut std::str::Chars<'_>) -> Option<u16> {
    (0..4).try_fold(0, |unit: u16, _| Some(unit << 4 | characters.next()?.to_digit(16)? as u16))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(reason: &str, retry: bool) -> Option<Answer> {
        Some(Answer::Refused { reason: reason.to_owned(), retry })
    }

    #[test]
    fn answers_are_read() {
        assert_eq!(parse(r#"{"ok":true}"#), Some(Answer::Accepted));
        assert_eq!(parse(" {\t\"ok\" : true } \r"), Some(Answer::Accepted));
        assert_eq!(parse(r#"{"ok":true,"reason":"","retry":false}"#), Some(Answer::Accepted));
        assert_eq!(parse(r#"{"ok":false}"#), refused("", true));
        assert_eq!(
            parse(r#"{"retry":false,"reason":"not a video","ok":false}"#),
            refused("not a video", false)
        );
    }

    #[test]
    fn reasons_may_hold_any_character() {
        let escaped = r#"{"ok":false,"reason":"\"\\\/\b\f\n\r\t\u00e9\ud83d\ude00é😀"}"#;
        assert_eq!(parse(escaped), refused("\"\\/\u{8}\u{c}\n\r\té😀é😀", true));
    }

    #[test]
    fn everything_else_is_no_answer() {
        for text in [
            "",
            "{}",
            "ok",
            "true",
            r#"{"ok":1}"#,
            r#"{"ok":"true"}"#,
            r#"{"ok":null}"#,
            r#"{"ok":truer}"#,
            r#"{"ok":true,}"#,
            r#"{"ok":true"#,
            r#"{"ok":true}}"#,
            r#"{"ok":true}{"ok":true}"#,
            r#"{"ok":true,"ok":false}"#,
            r#"{"ok":false,"reason":null}"#,
            r#"{"ok":false,"reason":{"a":1}}"#,
            r#"{"ok":false,"cause":"x"}"#,
            r#"{"reason":"x"}"#,
            r#"{'ok':true}"#,
            r#"{"ok":false,"reason":"\x"}"#,
            r#"{"ok":false,"reason":"\ud83d"}"#,
            r#"{"ok":false,"reason":"\u+123"}"#,
            "{\"ok\":false,\"reason\":\"\u{1}\"}",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}

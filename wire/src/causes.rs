//! An error as one line: its message, and those of its causes that it does not state itself.

use std::error::Error;

/// The message with its causes, outermost first, none of them twice.
pub fn with_causes(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("outer{0}")]
    struct Outer(&'static str, #[source] std::io::Error);

    #[test]
    fn causes_are_named_once() {
        let cause = || std::io::Error::other("cause");
        assert_eq!(with_causes(&Outer("", cause())), "outer: cause");
        assert_eq!(with_causes(&Outer(": cause", cause())), "outer: cause");
    }
}

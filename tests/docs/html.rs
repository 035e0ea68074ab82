//! What a piece of HTML links to, and what links may lead to.

use std::cell::RefCell;

use html5ever::{
    tendril::StrTendril,
    tokenizer::{
        BufferQueue, Tag, TagKind, Token, TokenSink, TokenSinkResult, Tokenizer, TokenizerOpts, states::RawKind,
    },
};

/// The values of `href` and `src`, and those of `id`.
#[derive(Default)]
pub struct Attributes {
    pub links: Vec<String>,
    pub anchors: Vec<String>,
}

#[derive(Default)]
struct Collector(RefCell<Attributes>);

impl TokenSink for Collector {
    type Handle = ();

    fn process_token(&self, token: Token, _line: u64) -> TokenSinkResult<()> {
        let Token::TagToken(Tag { kind: TagKind::StartTag, name, attrs, .. }) = token else {
            return TokenSinkResult::Continue;
        };
        let mut found = self.0.borrow_mut();
        for attribute in attrs {
            match attribute.name.local.as_ref() {
                "href" | "src" => found.links.push(attribute.value.to_string()),
                "id" => found.anchors.push(attribute.value.to_string()),
                _ => {}
            }
        }
        // Without a tree builder the tokenizer cannot know that what follows is not HTML.
        if name.as_ref() == "script" {
            return TokenSinkResult::RawData(RawKind::ScriptData);
        }
        TokenSinkResult::Continue
    }
}

pub fn attributes(html: &str) -> Attributes {
    let input = BufferQueue::default();
    input.push_back(StrTendril::from(html));
    let tokenizer = Tokenizer::new(Collector::default(), TokenizerOpts::default());
    let _ = tokenizer.feed(&input);
    tokenizer.end();
    tokenizer.sink.0.into_inner()
}
